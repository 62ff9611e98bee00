"""Counts and statistics of a batch, summed over all ranks."""
