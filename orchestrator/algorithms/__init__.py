"""What rollouts are trained for: reinforcement, imitation of a teacher, or distance to one, as weights on tokens."""
