"""What is measured, and the figures of the last measurement (`results/`)."""
