"""An index of a run's saved rollouts and exported tokens."""
