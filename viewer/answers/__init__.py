"""Questions about a run, answered from the index and the metric files."""
