"""`SlotTable`: the running sequences as arrays, one row per slot.

Invariant: running sequences occupy rows `0..num_running-1`. Row `i` of every array belongs to `sequences[i]`, and to
slot `i` of the KV cache, which holds positions `0..lengths[i]-2`: the newest token has not been fed to the model.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from inference.api.arrays import Floats, Int32s
from inference.api.generation import Completion, Job, TopLogprobs
from transport.wire.generation import FinishReason
from transport.wire.sample import VersionSpan
from transport.wire.tensor import Array


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
