"""The orchestrator's side: greets ranks, answers requests, counts what is not a message."""
