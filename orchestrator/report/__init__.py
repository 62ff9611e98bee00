"""What is reported: metrics of a step, selection bias, status."""
