"""Turns examples into training batches: schedules rollouts, finalizes groups, computes advantages, ships batches.

Runs without torch.
"""
