"""What the disk can do to a run: full, torn, corrupt; and weights that get lost on their way."""
