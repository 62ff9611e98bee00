"""Where batches come from: the orchestrator, a recorded run, or made up."""
