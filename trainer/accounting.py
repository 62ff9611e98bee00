"""`Accounting`: what was really trained. Dummies and padding never count."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.micro_batch import MicroBatch

_NAMES = ("tokens", "loss_tokens", "samples", "micro_batches")


@dataclass(frozen=True)
class Accounting:
    """Sums over micro batches with samples, and the largest of them in tokens."""

    num_tokens: int
    num_loss_tokens: int
    num_samples: int
    num_micro_batches: int
    max_micro_batch_tokens: int

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> "Accounting":
        """What this rank trains."""
        real = [batch for batch in micro_batches if not batch.is_dummy]
        return cls(
            num_tokens=sum(batch.num_tokens for batch in real),
            num_loss_tokens=sum(batch.num_loss_tokens for batch in real),
            num_samples=sum(batch.sample_count for batch in real),
            num_micro_batches=len(real),
            max_micro_batch_tokens=max((batch.num_tokens for batch in real), default=0),
        )

    def sums(self) -> Tensor:
        """float64[4] on the host: what adds up over ranks."""
        counts = (self.num_tokens, self.num_loss_tokens, self.num_samples, self.num_micro_batches)
        return torch.tensor(counts, dtype=torch.float64)

    def metrics(self, global_sums: Tensor, global_max: float, cap: int) -> dict[str, float]:
        """Metrics by name; `global_sums` are the `sums()` of all ranks added up, `global_max` their largest micro batch
        in tokens."""
        local = dict(zip(_NAMES, self.sums().tolist(), strict=True))
        total = dict(zip(_NAMES, global_sums.tolist(), strict=True))
        return {
            **{f"{name}/local": value for name, value in local.items()},
            **{f"{name}/global": value for name, value in total.items()},
            "micro_batch_tokens/max": global_max,
            "micro_batch_max_tokens": float(cap),
        }
