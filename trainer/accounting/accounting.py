"""`Accounting`: what was really trained. Dummies and padding never count."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.planning.micro_batch import MicroBatch

_NAMES = ("tokens", "loss_tokens", "samples", "micro_batches")
_IMAGE_NAMES = ("images", "image_tokens", "image_patches")
"""Left out of the metrics where there is no image."""


@dataclass(frozen=True)
class Accounting:
    """Sums over micro batches with samples, and the largest of them in tokens."""

    num_tokens: int
    num_loss_tokens: int
    num_samples: int
    num_micro_batches: int
    max_micro_batch_tokens: int
    num_images: int = 0
    num_image_tokens: int = 0
    """Of the tokens, those that stand for images."""
    num_image_patches: int = 0
    """What the vision tower has seen."""

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> "Accounting":
        """The sums over the micro batches of this rank."""
        real = [batch for batch in micro_batches if not batch.is_dummy]
        images = [batch.images for batch in real if batch.images is not None]
        return cls(
            num_tokens=sum(batch.num_tokens for batch in real),
            num_loss_tokens=sum(batch.num_loss_tokens for batch in real),
            num_samples=sum(batch.sample_count for batch in real),
            num_micro_batches=len(real),
            max_micro_batch_tokens=max((batch.num_tokens for batch in real), default=0),
            num_images=sum(part.num_images for part in images),
            num_image_tokens=sum(part.num_tokens for part in images),
            num_image_patches=sum(part.num_patches for part in images),
        )

    @classmethod
    def of_all_ranks(cls, sums: Tensor, max_micro_batch_tokens: float) -> "Accounting":
        """From the added `sums()` of all ranks, and the largest micro batch of any."""
        tokens, loss_tokens, samples, micro_batches, images, image_tokens, image_patches = map(int, sums.tolist())
        return cls(
            num_tokens=tokens,
            num_loss_tokens=loss_tokens,
            num_samples=samples,
            num_micro_batches=micro_batches,
            max_micro_batch_tokens=int(max_micro_batch_tokens),
            num_images=images,
            num_image_tokens=image_tokens,
            num_image_patches=image_patches,
        )

    def sums(self) -> Tensor:
        """float64[7] on the host: what adds up over ranks."""
        counts = (self.num_tokens, self.num_loss_tokens, self.num_samples, self.num_micro_batches)
        image_counts = (self.num_images, self.num_image_tokens, self.num_image_patches)
        return torch.tensor(counts + image_counts, dtype=torch.float64)

    def metrics(self, all_ranks: "Accounting", cap: int) -> dict[str, float]:
        """Metrics of this rank and of all ranks, by name."""
        total = dict(zip(_NAMES + _IMAGE_NAMES, all_ranks.sums().tolist(), strict=True))
        shown = _NAMES + _IMAGE_NAMES if total["images"] else _NAMES
        local = dict(zip(_NAMES + _IMAGE_NAMES, self.sums().tolist(), strict=True))
        return {
            **{f"{name}/local": local[name] for name in shown},
            **{f"{name}/global": total[name] for name in shown},
            "micro_batch_tokens/max": float(all_ranks.max_micro_batch_tokens),
            "micro_batch_max_tokens": float(cap),
        }
