"""The slow truth about packing: each segment as a row of its own.

`verify_packing` holds the chosen model and kernel to it at start-up, because every known way of getting packing wrong
(kernels, caches, layers that mix positions) is silent: the loss looks fine, and samples see each other.
"""

import numpy as np
import torch

from trainer.errors import ModelUnusable
from trainer.fsdp import reshard
from trainer.images.probes import check_positions, image_fields
from trainer.images.spec import ImageSpec
from trainer.logprobs import TokenScores
from trainer.micro_batch import MicroBatch
from trainer.model import Policy
from trainer.packing import pack
from trainer.probe_sample import probe_sample
from transport.wire.sample import TrainingSample

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference of a log probability; a leak is worth a nat or so. Rows of another length may be computed by other
kernels, and one step of a bfloat16 logit is worth 0.1 already."""


def forward_per_segment(policy: Policy, samples: list[TrainingSample], device: torch.device) -> TokenScores:
    """Scores of the trained tokens of `samples`, each sample alone in its row."""
    multiple, spec = policy.row_multiple, policy.image_spec
    rows = [pack([sample], [0], [0], multiple, images=spec) for sample in samples]
    scores = [policy(row.to(device)) for row in rows]
    return TokenScores(torch.cat([s.logprobs for s in scores]), torch.cat([s.entropies for s in scores]))


@torch.no_grad()
def verify_packing(policy: Policy, device: torch.device) -> None:
    """Raise `ModelUnusable` unless packed samples score as they do alone. A collective call: every rank makes it."""
    samples = _probes(policy)
    if policy.images is not None:
        check_positions(policy.causal_lm.base_model, policy.images, device)
    packed = policy(_row(samples, policy).to(device)).logprobs
    error = float((packed - forward_per_segment(policy, samples, device).logprobs).abs().max())
    # A forward without a backward leaves FSDP modules whole; an optimizer made now would hold parameters that are
    # thrown away at the next reshard, and train nothing.
    reshard(policy)
    if not error <= _TOLERANCE[policy.compute_dtype]:
        raise ModelUnusable(
            f"{type(policy.causal_lm).__name__} cannot be trained packed: samples that share a row change each other's "
            f"log probabilities by up to {error:.3g}; choose another model.attention, or report the model"
        )


def _probes(policy: Policy) -> list[TrainingSample]:
    vocab_size = policy.causal_lm.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    samples = [probe_sample(rng.integers(0, vocab_size, length)) for length in (9, 5, 12)]
    if policy.images is None:
        return samples
    seeing = [_image_probe(policy.images.spec, layout, vocab_size, rng) for layout in (".s...w.", "w..ss...", "...sw")]
    return [*seeing, *samples]  # images of two samples touch


def _row(samples: list[TrainingSample], policy: Policy) -> MicroBatch:
    spec, numbers, multiple = policy.image_spec, range(len(samples)), 4 * policy.row_multiple
    return pack(samples, [0] * len(samples), numbers, multiple, images=spec, needs_image=spec is not None)


def _image_probe(spec: ImageSpec, layout: str, vocab_size: int, rng: np.random.Generator) -> TrainingSample:
    is_image, fields = image_fields(spec, layout, rng)
    token_ids = np.where(is_image, spec.image_token_id, rng.integers(0, vocab_size, len(is_image)))
    return probe_sample(token_ids, ~is_image, **fields)
