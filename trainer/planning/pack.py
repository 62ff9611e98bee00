"""Samples to micro batches: one concatenation per column, no loop over tokens.

Samples come as `check_image_samples` leaves them: cut to `seq_len`. Absent weight streams mean `rl` = 1 and `ce` =
`ref_kl` = 0, on trained tokens; a weight on a token that `loss_mask` leaves out has no effect.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.errors import BatchMismatch
from trainer.images.inputs import dummy_image, merge_images
from trainer.images.spec import ImageSpec
from trainer.planning.micro_batch import LossTokens, MicroBatch
from trainer.planning.plan import StepPlan
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

Floats = npt.NDArray[np.float32]
PADDING_TOKEN_ID = 0
"""Any valid id: padding is a segment of its own, so no sample sees it."""


def pack_mini_batch(
    plan: StepPlan,
    mini_batch_index: int,
    rank: int,
    samples: Mapping[int, TrainingSample],
    pad_multiple: int = 1,
    images: ImageSpec | None = None,
    refused: Collection[int] = (),
) -> list[MicroBatch]:
    """The micro batches of `rank`, in the order of the plan, dummies included.

    `samples` maps manifest rows to samples; `refused` rows are left out, whatever the plan says. Raises
    `BatchMismatch` if one is missing or is not what the manifest said.
    """
    mini_batch = plan.mini_batches[mini_batch_index]
    micro_batches = []
    for round_index in range(mini_batch.num_rounds):
        rows = [row for row in mini_batch.micro_batch_rows(rank, round_index).tolist() if row not in refused]
        _check_rows(plan, rows, samples)
        env_ids = [plan.env_names.index(samples[row].env_name) for row in rows]
        units = plan.units[rows].tolist()
        needs_image = bool(mini_batch.image_rounds[round_index])
        chosen = [samples[row] for row in rows]
        micro_batches.append(pack(chosen, env_ids, rows, pad_multiple, units, images=images, needs_image=needs_image))
    return micro_batches


def pack(
    samples: Sequence[TrainingSample],
    env_ids: Sequence[int],
    rows: Sequence[int],
    pad_multiple: int = 1,
    units: Sequence[int] | None = None,
    *,
    images: ImageSpec | None = None,
    needs_image: bool = False,
) -> MicroBatch:
    """One micro batch. No samples: a dummy of one token. `pad_multiple` rounds the row up with a padding segment.

    `units` are those of the plan; `None`: every token of the batch counts alike. `needs_image`: other ranks have an
    image in this round, so a row without any gets a dummy image, as a segment of one token.
    """
    seq_lens = [sample.num_tokens for sample in samples]
    has_image = any(sample.mm_kwargs for sample in samples)
    extra_lens = _padding_lens(sum(seq_lens), pad_multiple, has_dummy_image=needs_image and not has_image)
    token_ids = [sample.token_ids.numpy() for sample in samples]
    all_lens = (*seq_lens, *extra_lens)
    position_ids = torch.from_numpy(np.concatenate([np.arange(length) for length in all_lens]))
    image_inputs = None
    if needs_image or has_image:
        assert images is not None, "image samples were planned for a model that cannot see"
        image_inputs = (
            merge_images(samples, images, sum(extra_lens))
            if has_image
            else dummy_image(position_ids, sum(seq_lens), images)
        )
    return MicroBatch(
        token_ids=torch.from_numpy(
            np.concatenate([*token_ids, np.full(sum(extra_lens), PADDING_TOKEN_ID)]).astype(np.int64)
        ),
        position_ids=position_ids,
        seq_lens=all_lens,
        sample_count=len(samples),
        env_ids=torch.tensor(env_ids, dtype=torch.int64),
        units=torch.tensor([0] * len(samples) if units is None else units, dtype=torch.int64),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=torch.tensor([_sample_advantage(sample) for sample in samples], dtype=torch.float32),
        sample_rows=tuple(rows),
        loss_tokens=_loss_tokens(samples, seq_lens),
        images=image_inputs,
    )


def _padding_lens(num_tokens: int, pad_multiple: int, *, has_dummy_image: bool) -> tuple[int, ...]:
    """Lengths of the segments behind the samples: the dummy image, and what fills the row up."""
    dummy = (1,) if has_dummy_image else ()
    filled = num_tokens + sum(dummy)
    num_padding = -filled % pad_multiple if filled else pad_multiple
    return (*dummy, num_padding) if num_padding else dummy


def _check_rows(plan: StepPlan, rows: Sequence[int], samples: Mapping[int, TrainingSample]) -> None:
    for row in rows:
        if row not in samples:
            raise BatchMismatch(f"row {row} of batch {plan.step} was planned but not fetched")
        sample = samples[row]
        length, planned = sample.num_tokens, int(plan.lengths[row])
        is_cut = sample.mm_token_type_ids is not None and length < planned == plan.seq_len  # before an image
        if (length != planned and not is_cut) or sample.env_name not in plan.env_names:
            raise BatchMismatch(
                f"row {row} of batch {plan.step} is {sample.trajectory_id} of env {sample.env_name!r} with "
                f"{length} tokens, which its manifest does not say"
            )


def _loss_tokens(samples: Sequence[TrainingSample], seq_lens: Sequence[int]) -> LossTokens:
    mask = np.concatenate([*(sample.loss_mask.numpy() for sample in samples), np.zeros(0, dtype=np.bool_)])

    def column(values: Sequence[float | EncodedTensor | None], dtype: type[np.generic] = np.float32) -> Tensor:
        parts = [_expand(value, length, dtype) for value, length in zip(values, seq_lens, strict=True)]
        return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype=dtype)])[mask])

    ref_kl_weights = _members(column([sample.ref_kl_weights for sample in samples]))
    return LossTokens(
        index=torch.from_numpy(np.flatnonzero(mask)),
        segments=torch.from_numpy(np.repeat(np.arange(len(samples)), seq_lens)[mask]),
        labels=column([sample.token_ids for sample in samples], np.int64),
        logprobs=column([sample.logprobs for sample in samples]),
        advantages=column([sample.advantages for sample in samples]),
        temperatures=column([sample.temperature for sample in samples]),
        rl_weights=_members(column([1.0 if s.rl_weights is None else s.rl_weights for s in samples])),
        ce_weights=_members(column([sample.ce_weights for sample in samples])),
        ref_kl_weights=ref_kl_weights,
        ref_logprobs=None if ref_kl_weights is None else column([_reference(sample) for sample in samples]),
    )


def _expand(value: float | EncodedTensor | None, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if isinstance(value, EncodedTensor):
        return value.numpy().astype(dtype, copy=False)
    return np.full(length, value or 0.0, dtype=dtype)


def _members(weights: Tensor) -> Tensor | None:
    return weights if bool((weights != 0).any()) else None


def _reference(sample: TrainingSample) -> EncodedTensor | None:
    if sample.ref_kl_weights is not None and sample.ref_logprobs is None:
        raise BatchMismatch(f"{sample.trajectory_id} has ref_kl_weights but no ref_logprobs to measure against")
    return sample.ref_logprobs


def _sample_advantage(sample: TrainingSample) -> float:
    if not isinstance(sample.advantages, EncodedTensor):
        return sample.advantages
    trained = sample.advantages.numpy()[sample.loss_mask.numpy()]
    return float(trained.mean()) if trained.size else 0.0
