"""The reference for packing: each segment as a row of its own.

`verify_packing` holds the chosen model and kernel to it at start-up, because every known way of getting packing wrong
(kernels, caches, layers that mix positions) is silent: the loss looks fine, and samples see each other.
"""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer.batches.fake import probe_sample
from trainer.errors import ModelUnusable
from trainer.images.spec import GRIDS, IMAGE_TYPE, PIXELS, ImageSpec, block_starts, rope_positions
from trainer.model.fsdp import reshard
from trainer.model.logprobs import TokenScores
from trainer.model.policy import Policy
from trainer.model.vision import ImageModel
from trainer.planning.pack import MicroBatch, pack
from transport.wire.sample import Array, EncodedTensor, TrainingSample

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


def image_fields(spec: ImageSpec, layout: str, rng: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """(image mask, fields of a sample): a `.` of `layout` is a token of text, an `s` or `w` a square or wide image."""
    sides = {"s": (spec.merge_size, spec.merge_size), "w": (spec.merge_size, 2 * spec.merge_size)}
    grids = np.array([(1, *sides[kind]) for kind in layout if kind in sides], dtype=np.int64).reshape(-1, 3)
    sizes = iter(spec.tokens_per_image(grids).tolist())
    types = np.concatenate([[IMAGE_TYPE] * next(sizes) if kind in sides else [0] for kind in layout]).astype(np.uint8)
    pixels = rng.normal(size=(int(grids.prod(axis=1).sum()), spec.patch_numbers)).astype(np.float32)
    tensors = {PIXELS: EncodedTensor.of(pixels), GRIDS: EncodedTensor.of(grids)}
    return types == IMAGE_TYPE, {"mm_kwargs": tensors, "mm_token_type_ids": EncodedTensor.of(types)}


def check_positions(base_model: PreTrainedModel, images: ImageModel, device: torch.device) -> None:
    """Raise `ModelUnusable` unless the positions we give to tokens are the model's own, where it has an opinion."""
    rng = np.random.default_rng(0)
    mask, fields = image_fields(images.spec, "..w.s...", rng)
    token_ids = np.where(mask, images.spec.image_token_id, 0)
    grids = fields["mm_kwargs"][GRIDS].numpy()
    ours = rope_positions(len(mask), block_starts(np.flatnonzero(mask), grids, images.spec), grids, images.spec)
    theirs, _ = base_model.get_rope_index(
        input_ids=torch.from_numpy(token_ids)[None].to(device),
        mm_token_type_ids=torch.from_numpy(mask.astype(np.int32))[None].to(device),
        image_grid_thw=torch.from_numpy(grids.copy()).to(device),
    )
    if not np.array_equal(theirs[:, 0].cpu().numpy(), ours):
        raise ModelUnusable(
            f"{images.family.model_type} gives its tokens other positions than this trainer does: its version in "
            "transformers is not one that we know"
        )
