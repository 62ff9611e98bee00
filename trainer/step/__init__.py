"""One optimizer step over all micro batches, and its report."""
