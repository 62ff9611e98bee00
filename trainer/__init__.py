"""Turns batches into policy versions: plan, fetch, pack, step, publish, checkpoint."""
