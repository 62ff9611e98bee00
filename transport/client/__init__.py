"""A trainer rank's side: asks for batches, reports what was trained, committed and published."""
