"""The token gateway: an OpenAI-compatible endpoint that speaks token ids to the engine and records them per rollout."""
