"""Checkpoints: saved, found, committed, exported."""
