"""Where metrics of a step go, and how they are read back."""
