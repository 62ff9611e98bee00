"""Tiny Qwen3 and Qwen3-VL models with a character tokenizer: real Hugging Face folders that train in seconds on one CPU
thread.

`python -m tiny_models --task copy-text --warm-start 0.2 --out models/copy-text` makes one. A folder appears whole (it
is built beside its place and renamed), so an interrupted maker leaves nothing that could be mistaken for a model.
"""
