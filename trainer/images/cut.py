"""Cutting a sample to a length. No cut goes through an image: it moves to the image's first token, and the image's
patches leave the sample with it."""

import msgspec
import numpy as np

from trainer.images.blocks import block_starts, grids_of, image_tokens_of
from trainer.images.spec import GRIDS, PIXELS, ImageSpec
from transport.wire.sample import TrainingSample, VersionSpan
from transport.wire.tensor import EncodedTensor

_STREAMS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "advantages",
    "ref_logprobs",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "mm_token_type_ids",
)
"""Fields with one entry per token."""


def cut_length(sample: TrainingSample, spec: ImageSpec, seq_len: int) -> int:
    """Tokens that stay: at most `seq_len`; 0 if the sample opens with an image that is longer."""
    if sample.num_tokens <= seq_len:
        return sample.num_tokens
    grids = grids_of(sample)
    starts = block_starts(image_tokens_of(sample), grids, spec)
    split = starts[(starts < seq_len) & (starts + spec.tokens_per_image(grids) > seq_len)]
    return int(split[0]) if split.size else seq_len


def cut_sample(sample: TrainingSample, spec: ImageSpec | None, seq_len: int) -> TrainingSample:
    """The first `cut_length` tokens of a sound sample, with the images that are whole in them. Nothing is copied; a
    sample that is short enough is returned itself. Without `spec` there are no images."""
    if sample.num_tokens <= seq_len:
        return sample
    length = seq_len if spec is None else cut_length(sample, spec, seq_len)
    images = sample.mm_kwargs if spec is None else _images_before(sample, spec, length)
    streams = {name: _head(getattr(sample, name), length) for name in _STREAMS}
    versions = _spans_within(sample.versions, length)
    return msgspec.structs.replace(sample, **streams, versions=versions, mm_kwargs=images)


def _spans_within(versions: tuple[VersionSpan, ...], length: int) -> tuple[VersionSpan, ...]:
    """Which policy sampled which of the first `length` tokens."""
    spans = (msgspec.structs.replace(span, end=min(span.end, length)) for span in versions)
    return tuple(span for span in spans if span.start < span.end)


def _head(stream: float | EncodedTensor | None, length: int) -> float | EncodedTensor | None:
    return EncodedTensor.of(stream.numpy()[:length]) if isinstance(stream, EncodedTensor) else stream


def _images_before(sample: TrainingSample, spec: ImageSpec, length: int) -> dict[str, EncodedTensor]:
    grids = grids_of(sample)
    num_images = int(np.searchsorted(block_starts(image_tokens_of(sample), grids, spec), length))
    if num_images == 0:
        return {}
    pixels, kept = sample.mm_kwargs[PIXELS], sample.mm_kwargs[GRIDS].numpy()[:num_images]
    num_patches = int(grids[:num_images].prod(axis=1).sum())
    data = pixels.data[: num_patches * (pixels.num_bytes // pixels.shape[0])]
    return {
        PIXELS: EncodedTensor(pixels.dtype, (num_patches, *pixels.shape[1:]), data),
        GRIDS: EncodedTensor.of(kept),
    }
