"""The embedded engine: continuous batching over a Hugging Face causal LM, small and exact.

```
 HTTP loop ── Job ──▶ TorchEngine ══ queue ══▶ EngineThread ──▶ Decoder: admit → prefill → step → retire
      ▲                                             │                       SlotTable + SlotCache + model
      └────────── Completion (call_soon_threadsafe) ┘
```
"""
