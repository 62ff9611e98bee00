"""What is minimised: `rl` losses by name, and the weighted sum of `rl`, `ce` and `ref_kl`."""
