"""`Progress`: how far the run is. Part of every checkpoint, and all of it that is not a tensor."""

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batches `1..step` have been trained, exactly once each."""

    step: int = 0
    """Last trained batch; also the policy version that the model is."""
    num_samples: int = 0
    """Samples trained so far, over all ranks."""
    num_tokens: int = 0
    """Tokens trained so far, over all ranks, padding excluded."""
    num_non_finite: int = 0
    """Non-finite steps in a row up to now: they were skipped."""

    def advance(self, step: int, *, num_samples: int, num_tokens: int, finite: bool) -> "Progress":
        """Progress after batch `step`, which must be the next one."""
        if step != self.step + 1:
            raise ValueError(f"batch {step} does not follow step {self.step}")
        return Progress(
            step=step,
            num_samples=self.num_samples + num_samples,
            num_tokens=self.num_tokens + num_tokens,
            num_non_finite=0 if finite else self.num_non_finite + 1,
        )
