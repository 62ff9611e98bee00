"""What every process shares: configuration, run directory, logging, metrics, health, watchdog, launcher.

Knows nothing about reinforcement learning and imports no service.
"""
