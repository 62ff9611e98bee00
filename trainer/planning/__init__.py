"""Which sample goes to which rank and row, and the packed micro batches."""
