"""Serves the policy over HTTP: the embedded `torch` engine (small, exact, CPU or GPU) and `vllm`."""
