"""`check_image_samples`: of the samples of a batch, those that can be trained, and why the others cannot.

A model puts image features wherever it is told to, so a sample that counts its images wrongly would take the features
of its neighbours in the row, without an error. Each sample is therefore checked before it is packed; one that fails is
left out by name, and nothing else is lost. Samples that are too long are cut here, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trainer.images.spec import (
    GRIDS,
    IMAGE_TYPE,
    PIXELS,
    ImageSpec,
    are_whole,
    block_starts,
    grids_of,
    image_tokens_of,
    is_finite,
)
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan

PIXEL_TYPES = ("float32", "bfloat16", "float16")
"""Types that widen to float32 without a loss, so that samples of different types can be merged."""


@dataclass(frozen=True)
class CheckedSamples:
    """By row of the manifest: every row that was asked for is in exactly one of the two."""

    samples: Mapping[int, TrainingSample]
    refused: Mapping[int, str] = field(default_factory=dict)
    """Why, with the ids of the sample."""


def check_image_samples(samples: Mapping[int, TrainingSample], spec: ImageSpec | None, seq_len: int) -> CheckedSamples:
    """What can be trained by a model with `spec`, cut to `seq_len`; `None`: a model without images, for which the
    planner stands."""
    accepted: dict[int, TrainingSample] = {}
    refused: dict[int, str] = {}
    for row, sample in samples.items():
        reason = None if spec is None else why_refused(sample, spec, seq_len)
        if reason is None:
            accepted[row] = cut_sample(sample, spec, seq_len)
        else:
            refused[row] = f"{sample.trajectory_id} of example {sample.example_id} of env {sample.env_name!r} {reason}"
    return CheckedSamples(accepted, refused)


def why_refused(sample: TrainingSample, spec: ImageSpec, seq_len: int) -> str | None:
    """What is wrong with the images of a sample; `None`: nothing."""
    num_named = int(np.count_nonzero(sample.token_ids.numpy() == spec.image_token_id))
    if not sample.mm_kwargs:
        if num_named:
            return f"has the image token {spec.image_token_id} {num_named} times but no image"
        return "marks image tokens but has no image" if image_tokens_of(sample).size else None
    return _wrong_tensors(sample, spec) or _wrong_tokens(sample, spec) or _wrong_length(sample, spec, seq_len)


def _wrong_tensors(sample: TrainingSample, spec: ImageSpec) -> str | None:
    if set(sample.mm_kwargs) != {PIXELS, GRIDS}:
        return f"has mm_kwargs {sorted(sample.mm_kwargs)}, not {PIXELS} and {GRIDS}"
    pixels, grids = sample.mm_kwargs[PIXELS], sample.mm_kwargs[GRIDS]
    if grids.dtype not in ("int32", "int64") or len(grids.shape) != 2 or grids.shape[1] != 3 or not grids.shape[0]:
        return f"has {GRIDS} {grids.dtype}{list(grids.shape)}, not one row of three integers per image"
    sizes = grids_of(sample)
    if (sizes[:, 0] != 1).any() or (sizes < 1).any() or (sizes[:, 1:] % spec.merge_size).any():
        return f"has an image of {sizes.tolist()} patches: one frame, and sides that are multiples of {spec.merge_size}"
    if pixels.dtype not in PIXEL_TYPES or pixels.shape[1:] != (spec.patch_numbers,):
        wanted = f"{' or '.join(PIXEL_TYPES)}[patches, {spec.patch_numbers}]"
        return f"has {PIXELS} {pixels.dtype}{list(pixels.shape)}; the model takes {wanted}"
    if pixels.shape[0] != sizes.prod(axis=1).sum():
        return f"has {pixels.shape[0]} patches, but its grids have {sizes.prod(axis=1).sum()}"
    return None if is_finite(pixels.numpy(), pixels.dtype) else f"has {PIXELS} that are not finite"


def _wrong_tokens(sample: TrainingSample, spec: ImageSpec) -> str | None:
    if sample.mm_token_type_ids is None:
        return "has images but no mm_token_type_ids"
    types, named = sample.mm_token_type_ids.numpy(), sample.token_ids.numpy() == spec.image_token_id
    if types.max() > IMAGE_TYPE:
        return f"has tokens of modality {types.max()}; images (1) and text (0) can be trained"
    grids, places = grids_of(sample), np.flatnonzero(types)
    wanted = int(spec.tokens_per_image(grids).sum())
    if len(places) != wanted:
        return f"marks {len(places)} image tokens, but its {len(grids)} images need {wanted}"
    if not np.array_equal(named, types == IMAGE_TYPE):
        return f"has the image token {spec.image_token_id} where mm_token_type_ids says text, or the reverse"
    if not are_whole(places, grids, spec):
        return "has another token inside the tokens of an image"
    return "trains image tokens, which no policy sampled" if sample.loss_mask.numpy()[places].any() else None


def _wrong_length(sample: TrainingSample, spec: ImageSpec, seq_len: int) -> str | None:
    if cut_length(sample, spec, seq_len):
        return None
    return f"opens with an image that is longer than model.seq_len ({seq_len})"


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
