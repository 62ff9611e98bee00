"""`rl doctor`: who waits for whom."""
