"""Attention that knows where samples begin and end."""
