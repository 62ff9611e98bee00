"""The run directory and the lock of each service in it."""
