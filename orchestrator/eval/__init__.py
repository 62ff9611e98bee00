"""Evaluation beside training: its own environments, at a fixed policy version."""
