"""Environments behind one small protocol."""
