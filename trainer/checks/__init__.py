"""Checks before a run: packing, losses, and the canary of each version."""
