"""`rl`: starts and watches all services of one machine."""
