"""What `waiting_ranks.py` and its test must agree on. Importing it costs nothing."""

TIMEOUT_S = 5.0
"""Seconds after which a collective of the ranks fails."""
AWAY_S = 1.3 * TIMEOUT_S
"""Seconds that a rank waits for what the other one has."""
NUM_STEPS = 2
