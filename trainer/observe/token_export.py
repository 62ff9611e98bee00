"""`TokenExport`: per-token records of some sequences of every step, for people and their notebooks.

    <dir>/step-00000012/rank-00000.jsonl     one line per chosen sequence that the rank trained
    <dir>/step-00000012/STABLE               written last: every rank's file is there and whole

Which sequences are chosen depends on seed and step alone, so all ranks agree and a replayed step chooses the same. The
export never changes training: a disk that is full costs the records of the step, and one warning.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from loguru import logger
from torch import Tensor

from trainer.config.trainer import TokenExportConfig
from trainer.losses.protocol import RlOutputs
from trainer.model.logprobs import TokenScores
from trainer.planning.pack import MicroBatch
from trainer.planning.plan import StepPlan
from trainer.ranks import Ranks
from transport.durable import atomic_write
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan

Column = list[float | bool | None]
"""One entry per token of the sequence; `None` where the token is not trained."""


FLAGS = ("is_masked", "is_masked_high", "is_masked_low")
"""Fields of `RlOutputs` that are recorded."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. All lists have one entry per token. A number that is not finite is written as `null`."""

    step: int
    row: int
    """Row of the sample in the batch."""
    rank: int
    micro_batch: int
    """Which of the forward passes of `rank` in this step, from 0."""
    position: int
    """Where the sequence begins in the packed row of that micro batch."""
    micro_batch_tokens: int
    """Length of the packed row."""
    env_name: str
    example_id: str
    group_id: str
    trajectory_id: str
    step_index: int
    temperature: float
    versions: tuple[VersionSpan, ...]
    """`[version, start, end]`: which policy sampled which tokens."""
    token_ids: list[int]
    loss_mask: list[bool]
    reward: list[float]
    advantage: list[float]
    inference_logprobs: Column
    trainer_logprobs: Column
    entropy: Column
    log_ratio: Column
    ratio: Column
    mismatch_kl: Column
    prob_delta: Column
    is_masked: Column
    is_masked_high: Column
    is_masked_low: Column


@dataclass(frozen=True)
class PackedPlace:
    """Where a sequence was trained, as `TokenRecord` names it."""

    micro_batch: int
    position: int
    micro_batch_tokens: int


@dataclass(frozen=True)
class _Watched:
    """One chosen sequence of a micro batch; the tensors are those of the whole micro batch, without their graph."""

    row: int
    place: PackedPlace
    tokens: slice
    """Its trained tokens, among those of the micro batch."""
    scores: TokenScores
    flags: dict[str, Tensor]
    """By the names of `FLAGS`; none if the micro batch has no `rl` tokens."""
    rl_weights: Tensor | None


class TokenRecorder:
    """A `Watch` for one batch. Keeps the first visit of each chosen row; further epochs are not recorded.

    It watches a training step without touching it: tensors are kept detached on their device, and read back only
    when the optimizer has stepped. `TokenRecord` is one line of the export; `docs/observing.md` describes it.
    """

    def __init__(self, step: int, rows: frozenset[int], samples: Mapping[int, TrainingSample], rank: int = 0) -> None:
        self.step = step
        self._rank = rank
        self._num_micro_batches = 0
        self._rows = set(rows)
        self._samples = samples
        self._watched: list[_Watched] = []

    def __call__(self, batch: MicroBatch, scores: TokenScores, rl: RlOutputs | None) -> None:
        """Keep what is needed of one micro batch."""
        end = 0
        kept = TokenScores(scores.logprobs.detach(), scores.entropies.detach())
        flags = {} if rl is None else {name: getattr(rl, name).detach() for name in FLAGS}
        starts = itertools.accumulate(batch.seq_lens, initial=0)
        for row, position in zip(batch.sample_rows, starts, strict=False):
            start, end = end, end + self._samples[row].num_loss_tokens
            if row in self._rows:
                self._rows.remove(row)
                place = PackedPlace(self._num_micro_batches, position, sum(batch.seq_lens))
                weights = batch.loss_tokens.rl_weights
                self._watched.append(_Watched(row, place, slice(start, end), kept, flags, weights))
        self._num_micro_batches += 1

    def records(self) -> Iterator[TokenRecord]:
        """The chosen sequences that this rank trained."""
        for watched in self._watched:
            yield self._record(watched)

    def _record(self, watched: _Watched) -> TokenRecord:
        sample = self._samples[watched.row]
        mask, length = sample.loss_mask.numpy(), sample.num_tokens
        new = _host(watched.scores.logprobs, watched.tokens)
        old = sample.logprobs.numpy()[mask].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            log_ratio = new - old
            ratio = np.exp(log_ratio)
            mismatch_kl, prob_delta = ratio - 1 - log_ratio, np.exp(new) - np.exp(old)
        return TokenRecord(
            step=self.step,
            row=watched.row,
            rank=self._rank,
            micro_batch=watched.place.micro_batch,
            position=watched.place.position,
            micro_batch_tokens=watched.place.micro_batch_tokens,
            env_name=sample.env_name,
            example_id=sample.example_id,
            group_id=sample.group_id,
            trajectory_id=sample.trajectory_id,
            step_index=sample.step_index,
            temperature=sample.temperature,
            versions=sample.versions,
            token_ids=sample.token_ids.numpy().tolist(),
            loss_mask=mask.tolist(),
            reward=[sample.reward] * length,
            advantage=_by_token(sample.advantages, length),
            inference_logprobs=_aligned(mask, old),
            trainer_logprobs=_aligned(mask, new),
            entropy=_aligned(mask, _host(watched.scores.entropies, watched.tokens)),
            log_ratio=_aligned(mask, log_ratio),
            ratio=_aligned(mask, ratio),
            mismatch_kl=_aligned(mask, mismatch_kl),
            prob_delta=_aligned(mask, prob_delta),
            **{name: _flags(name, mask, watched) for name in FLAGS},
        )


def _flags(name: str, mask: npt.NDArray[np.bool_], watched: _Watched) -> Column:
    """What the loss said of the tokens that belong to it; `None` for the others."""
    if watched.rl_weights is None or name not in watched.flags:
        return [None] * len(mask)
    members = (watched.rl_weights[watched.tokens] != 0).cpu().numpy()
    own = mask.copy()
    own[mask] = members
    return _aligned(own, watched.flags[name][watched.tokens].cpu().numpy()[members])


def _host(values: Tensor, tokens: slice) -> npt.NDArray[np.float64]:
    column: npt.NDArray[np.float64] = values[tokens].double().cpu().numpy()
    return column


def _by_token(value: float | EncodedTensor, length: int) -> list[float]:
    column: list[float] = value.numpy().tolist() if isinstance(value, EncodedTensor) else [value] * length
    return column


def _aligned(mask: npt.NDArray[np.bool_], values: npt.NDArray[np.float64] | npt.NDArray[np.bool_]) -> Column:
    column = np.full(len(mask), None, dtype=object)
    column[mask] = values.tolist()
    result: Column = column.tolist()
    return result


STABLE = "STABLE"
_FAILED = b"failed"


class TokenExport:
    """Writes below `folder`. `write` is a collective call; a rank whose `writes` is false takes part without a file."""

    def __init__(
        self, config: TokenExportConfig, folder: Path, ranks: Ranks, seed: int, *, writes: bool = True
    ) -> None:
        self._config = config
        self._folder = folder
        self._ranks = ranks
        self._seed = seed
        self._writes = writes
        self._has_warned = False

    def recorder(self, plan: StepPlan, samples: Mapping[int, TrainingSample]) -> TokenRecorder:
        """What watches the training of this batch."""
        limit = self._config.max_sequences_per_step
        rows = choose_rows(len(plan.lengths), (self._seed, plan.step), self._config.sampling_rate, limit)
        return TokenRecorder(plan.step, rows, samples, self._ranks.rank)

    def write(self, recorder: TokenRecorder) -> None:
        """Write what was recorded; `STABLE` only if every rank could. Replaces what was written before a crash, by
        however many ranks."""
        folder = step_folder(self._folder, recorder.step)
        self._first_rank(folder, lambda: (folder / STABLE).unlink(missing_ok=True))
        written = self._ranks.gather(self._ranks.wait_together(lambda: self._attempt(folder, recorder)))
        if _FAILED not in written:
            self._first_rank(folder, lambda: _complete(folder, {name.decode() for name in written}))

    def _first_rank(self, folder: Path, work: Callable[[], None]) -> None:
        """The others wait for it: a disk may take longer than they would in a collective."""
        self._ranks.wait_together(lambda: self._ranks.is_first and self._tried(folder, work))

    def _attempt(self, folder: Path, recorder: TokenRecorder) -> bytes:
        """The name of the file that was written; empty if this rank does not write any."""
        if not self._writes:
            return b""
        name = f"rank-{self._ranks.rank:05d}.jsonl"
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in recorder.records())
        return name.encode() if self._tried(folder, lambda: _write(folder / name, lines)) else _FAILED

    def _tried(self, folder: Path, work: Callable[[], None]) -> bool:
        try:
            work()
        except OSError as error:  # records are a help for people: training goes on without them
            if not self._has_warned:
                logger.warning(f"token export: {folder} cannot be written, its records are lost: {error}")
            self._has_warned = True
            return False
        return True


def _write(path: Path, lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, lines)


def _complete(folder: Path, names: set[str]) -> None:
    """Every file is there: remove those of ranks that are no more, and say that the rest is whole."""
    for path in folder.glob("rank-*.jsonl"):
        if path.name not in names:
            path.unlink()
    _write(folder / STABLE, b"")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def choose_rows(num_rows: int, seed: tuple[int, int], rate: float, limit: int) -> frozenset[int]:
    """Each row with probability `rate`, at most `limit` of them, all alike likely to stay."""
    draws = np.random.default_rng(seed).random(num_rows)
    first = np.argsort(draws, kind="stable")[:limit]
    return frozenset(first[draws[first] < rate].tolist())
