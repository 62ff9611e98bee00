"""The documentation: every command, example and link in it works."""
