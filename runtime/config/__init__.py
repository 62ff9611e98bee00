"""Config classes, their keys, their help and their errors."""
