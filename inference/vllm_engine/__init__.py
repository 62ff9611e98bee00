"""Serving with vLLM: its own OpenAI server in a child process, extended through its public extension points.

```
 inference (this service)            vLLM's API server                     vLLM's workers
 supervisor.py ──starts, watches──▶  plugin.py mounts routes.py            worker_extension.py
 command.py: its arguments           engine.py: over its client ───────────▶ weight_engine.py: stage, then apply
```

`vllm` is imported in this package and nowhere else; `command`, `supervisor`, `checkpoint` and `readback` do without.
"""
