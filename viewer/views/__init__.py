"""The same answers as live page, as report file and in the terminal."""
