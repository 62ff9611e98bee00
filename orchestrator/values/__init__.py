"""What flows through the orchestrator: rollouts, groups, batches."""
