"""Groups of rollouts: scheduled, collected, scored, guarded."""
