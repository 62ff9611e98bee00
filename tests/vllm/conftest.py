"""How `rl` is run with vLLM."""

FLAGS = ("--inference.engine", "vllm")
"""All that differs from a run with the embedded engine."""
