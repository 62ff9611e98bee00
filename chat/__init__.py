"""Conversations as exact tokens: templates, tokenizer, images, trajectories. Imports transport only, never torch."""
