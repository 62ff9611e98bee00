"""Scored groups to batches, by one staleness policy, and to training samples."""
