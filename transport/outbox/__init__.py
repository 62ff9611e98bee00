"""Batches on the orchestrator's disk until the trainer has committed them."""
