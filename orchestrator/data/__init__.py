"""Which example comes next: the order of all environments, their curricula, and the seeds of rollouts."""
