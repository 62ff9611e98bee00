"""Environments in processes of their own: whatever blocks or crashes there cannot stall the orchestrator."""
