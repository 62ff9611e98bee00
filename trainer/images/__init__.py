"""Image samples: which models can train them, what a sample must hold, and how images go through a packed row."""
