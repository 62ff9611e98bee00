"""New weights: applied to engines, verified, and how many rollouts may run."""
