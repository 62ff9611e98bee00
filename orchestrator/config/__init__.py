"""All config classes of the orchestrator. Imports none of its rooms."""
