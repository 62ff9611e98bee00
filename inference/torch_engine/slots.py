"""Slots: `SlotModel` (a Hugging Face causal LM that reads and writes a `SlotCache`) and `SlotTable` (who is in them).

Invariant: running sequences occupy rows `0..num_running-1` of the table. Row `i` of every array belongs to
`sequences[i]`, and to slot `i` of the KV cache, which holds positions `0..lengths[i]-2`: the newest token has not been
fed to the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.api.arrays import Floats, Int32s, Int64s
from inference.api.generation import Completion, Job, TopLogprobs
from inference.api.images import Images
from inference.torch_engine.attention import Decode, Prefill, SlotCache, WholeSequence
from inference.torch_engine.vision import Vision
from inference.vision_models import has_vision
from transport.wire.generation import FinishReason
from transport.wire.sample import Array, VersionSpan

NO_DIGESTS: Mapping[int, bytes] = MappingProxyType({})
NO_IMAGES: Mapping[int, Images] = MappingProxyType({})
MAX_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its memory, and how long running sequences wait for it."""


class PrefillPlan(NamedTuple):
    """`batches` of slots to compute, then `copies`: slots whose tokens equal those of a computed slot."""

    batches: list[list[int]]
    copies: dict[int, list[int]]
    """Computed slot to the slots that copy it. The rollouts of one group share their prompt, so this is the rule."""


def plan_prefill(
    tokens: Mapping[int, Int32s], max_tokens: int, images: Mapping[int, bytes] = NO_DIGESTS
) -> PrefillPlan:
    """Plan for `slot -> tokens to compute`. A batch is padded to its longest row; rows of like length share one, and
    none has more than `max_tokens` padded tokens unless a single row does. Slots without tokens are left out.
    `images` are digests: the same tokens with other images are not the same."""
    first_with: dict[tuple[bytes, bytes], int] = {}
    copies: dict[int, list[int]] = {}
    for slot, row in tokens.items():
        first = first_with.setdefault((images.get(slot, b""), row.tobytes()), slot)
        if first != slot and len(row):
            copies.setdefault(first, []).append(slot)
    unique = [slot for slot in first_with.values() if len(tokens[slot])]
    unique.sort(key=lambda slot: len(tokens[slot]))
    return PrefillPlan(list(_batches(unique, [len(tokens[slot]) for slot in unique], max_tokens)), copies)


def _batches(slots: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterable[list[int]]:
    """Cut rows sorted by length so that `rows x longest row <= max_tokens`."""
    batch: list[int] = []
    for slot, length in zip(slots, lengths, strict=True):
        if batch and (len(batch) + 1) * length > max_tokens:
            yield batch
            batch = []
        batch.append(slot)
    if batch:
        yield batch


def pad_right(rows: Sequence[Int32s]) -> Int32s:
    """Rows as one rectangle, padded with token 0."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


class SlotModel:
    """Forward passes over slots. The model's attention must be `attention.ATTENTION_NAME` (see `loading.py`)."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.hf = model
        self.device: torch.device = model.device
        self.cache = SlotCache(num_slots, max_length)
        self.vision = Vision(model) if has_vision(model) else None

    def prefill(self, tokens: dict[int, Int32s], images: Mapping[int, Images] = NO_IMAGES) -> None:
        """Compute keys and values of `slot -> tokens`, from position 0, and the images in them. No logits: `decode`
        feeds the token after."""
        plan = plan_prefill(tokens, MAX_PREFILL_TOKENS, {slot: seen.digest for slot, seen in images.items()})
        for batch in plan.batches:
            rows = pad_right([tokens[slot] for slot in batch])
            self._prefill_batch(batch, rows, [images.get(slot) for slot in batch])
        for source, targets in plan.copies.items():
            self.cache.copy(self._indices([source]), self._indices(targets), len(tokens[source]))

    def decode(self, tokens: Int32s, positions: Int64s, offsets: Int64s | None = None) -> Tensor:
        """Feed `tokens[i]` at `positions[i]` of slot `i`; returns the logits `[B, V]` of the next tokens.

        Rotary positions are `positions + offsets`: an image moves them on by less than it has tokens.
        """
        where = torch.from_numpy(positions).to(self.device)
        slots = Decode(self.cache, where, int(positions.max()) + 1)
        angles = where if offsets is None else torch.from_numpy(positions + offsets).to(self.device)
        ids = torch.from_numpy(tokens).to(self.device)[:, None]
        output = self.hf(input_ids=ids, position_ids=angles[:, None], use_cache=False, slots=slots)
        logits: Tensor = output.logits[:, -1]
        return logits

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Slots `targets` take over what `sources` hold, up to `length` positions."""
        if sources:
            self.cache.copy(self._indices(sources), self._indices(targets), length)

    def _prefill_batch(self, slots: list[int], tokens: Int32s, images: Sequence[Images | None]) -> None:
        prefill = Prefill(self.cache, self._indices(slots))
        ids = torch.from_numpy(tokens).to(self.device)
        if self.vision is not None:
            self.vision.forward(ids, images, prefill)
            return
        num_rows, length = tokens.shape
        positions = torch.arange(length, device=self.device).expand(num_rows, length)
        self.hf.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, slots=prefill)

    def _indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, device=self.device)


def sequence_logprobs(model: PreTrainedModel, token_ids: Int32s, temperature: float, max_length: int) -> Floats:
    """float32[T]: log probability of each token given those before it, at `temperature`; 0 at position 0.

    Holds the logits of one sequence, `[T, V]`, at a time: the engine's `max_model_len` bounds them.
    """
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    if len(token_ids) == 1:
        return logprobs
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)
    positions = torch.arange(len(ids) - 1, device=model.device)
    output = model(
        input_ids=ids[None, :-1], position_ids=positions[None], use_cache=False, slots=WholeSequence(max_length)
    )
    tempered = output.logits[0].float() / temperature
    scored = torch.log_softmax(tempered, dim=-1).gather(1, ids[1:, None])[:, 0]
    logprobs[1:] = scored.cpu().numpy()
    return logprobs


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One job. `key` is unique in the engine; `seed` is the job's own or one the engine chose."""

    key: int
    job: Job
    seed: int
    stop_ids: frozenset[int]
    limit: int
    """Prompt plus completion may not be longer than this."""
    switches: list[tuple[int, int]] = field(default_factory=list)
    """`(version, number of tokens sampled before it took over)`, in order."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def spans(self, num_sampled: int) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens; versions that sampled none are left out."""
        ends = [start for _, start in self.switches[1:]] + [num_sampled]
        spans = (VersionSpan(version, start, end) for (version, start), end in zip(self.switches, ends, strict=True))
        return tuple(span for span in spans if span.end > span.start)


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """The end of a sequence: a completion, or why there is none."""

    key: int
    result: Completion | Exception


class Moves(NamedTuple):
    """Rows that changed their slot: `targets[i]` is now what `sources[i]` was."""

    sources: list[int]
    targets: list[int]


class SlotTable:
    """All bookkeeping that a decode step touches, vectorised over the batch."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.sequences: list[EngineSequence] = []
        self.tokens = np.zeros((num_slots, max_length), dtype=np.int32)
        self.logprobs = np.zeros((num_slots, max_length), dtype=np.float32)
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        self.prompt_lengths = np.zeros(num_slots, dtype=np.int64)
        self.temperatures = np.zeros(num_slots, dtype=np.float32)
        self.top_ps = np.zeros(num_slots, dtype=np.float32)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)
        self.rotary_offsets = np.zeros(num_slots, dtype=np.int64)
        self._arrays: list[Array] = [self.tokens, self.logprobs, self.lengths, self.prompt_lengths]
        self._arrays += [self.temperatures, self.top_ps, self.seeds, self.rotary_offsets]

    @property
    def num_running(self) -> int:
        return len(self.sequences)

    @property
    def num_free(self) -> int:
        return self.num_slots - self.num_running

    def add(self, sequence: EngineSequence) -> int:
        """Give the next slot to `sequence`; returns its number."""
        slot, job = self.num_running, sequence.job
        self.sequences.append(sequence)
        self.tokens[slot, : len(job.prompt)] = job.prompt
        self.lengths[slot] = self.prompt_lengths[slot] = len(job.prompt)
        self.temperatures[slot] = job.temperature
        self.top_ps[slot] = job.top_p
        self.seeds[slot] = sequence.seed
        self.rotary_offsets[slot] = 0 if job.images is None else job.images.rotary_offset
        return slot

    def append(self, tokens: Int32s, logprobs: Floats) -> None:
        """Every running sequence grows by one token."""
        rows = np.arange(self.num_running)
        ends = self.lengths[: self.num_running]
        self.tokens[rows, ends] = tokens
        self.logprobs[rows, ends] = logprobs
        ends += 1

    def num_sampled(self, slot: int) -> int:
        """Tokens sampled so far in `slot`."""
        return int(self.lengths[slot] - self.prompt_lengths[slot])

    def sampled_tokens(self, slot: int) -> Int32s:
        """A view of the tokens sampled so far in `slot`."""
        return self.tokens[slot, self.prompt_lengths[slot] : self.lengths[slot]]

    def completion(self, slot: int, reason: FinishReason) -> Completion:
        """A copy of what `slot` has sampled."""
        sampled = slice(self.prompt_lengths[slot], self.lengths[slot])
        sequence = self.sequences[slot]
        return Completion(
            token_ids=self.tokens[slot, sampled].copy(),
            logprobs=self.logprobs[slot, sampled].copy(),
            finish_reason=reason,
            versions=sequence.spans(self.num_sampled(slot)),
            top_logprobs=tuple(sequence.top_logprobs),
        )

    def remove(self, slots: list[int]) -> Moves:
        """Free `slots` and close the gaps with the last rows. The KV cache must make the same moves."""
        gone = set(slots)
        num_left = self.num_running - len(gone)
        sources = [row for row in range(num_left, self.num_running) if row not in gone]
        targets = sorted(row for row in gone if row < num_left)
        for array in self._arrays:
            array[targets] = array[sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]
        del self.sequences[num_left:]
        return Moves(sources, targets)
