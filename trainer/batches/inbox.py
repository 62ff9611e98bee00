"""`Inbox`: batches in order, each exactly once, the same one on all ranks at the same time. `Reporter`: the way back.

Every rank asks the orchestrator on its own link, and none goes on before all have their answers: an orchestrator that
goes away between two of them is waited for by all ranks together (`Ranks.wait_together`). A rank that is asked to stop
asks the others, so that none goes on waiting for a batch. They then compare: all hold the same batch, or all stop
before the step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from loguru import logger

from runtime.errors import PeerLostError
from runtime.health.health import Health
from runtime.process.shutdown import Shutdown
from trainer.batches.source import BatchSource, NoBatch, ProgressReports
from trainer.errors import RankMismatch
from trainer.ranks import Ranks
from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample

_T = TypeVar("_T")


class Inbox:
    """What the training loop sees of a `BatchSource`. All but `wait_for_end` and `close` is collective."""

    def __init__(
        self,
        source: BatchSource,
        ranks: Ranks,
        *,
        max_steps: int | None,
        stop: Shutdown,
        health: Health,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._max_steps = max_steps
        self._stop = stop
        self._health = health
        self.ended = False
        """Whether `batches` came to the end of the run, and not to a stop request."""

    def batches(self, after: int) -> Iterator[BatchManifest]:
        """Batches `after + 1, after + 2, ...` until the run ends or any rank is asked to stop."""
        step = after + 1
        while (manifest := self._next(step)) is not None:
            yield manifest
            step += 1

    def fetch(self, manifest: BatchManifest, rows: Sequence[int]) -> dict[int, TrainingSample]:
        """The samples of `rows`, by row; each rank asks for its own."""
        samples = self._together(lambda: self._source.samples(manifest, rows))
        return dict(zip(rows, samples, strict=True))

    def wait_for_end(self, last_step: int) -> None:
        """Wait until the orchestrator says that the run is over, which it does once the engines have the last version.

        Everything is durable by now: an orchestrator that is gone is not an error any more.
        """
        try:
            self._source.manifest(last_step + 1)
        except PeerLostError as error:
            logger.warning(f"the run is complete; whether the engines have its last version is unknown: {error}")

    def close(self, reason: str) -> None:
        """Leave the source, and say why."""
        self._source.close(reason)

    def _next(self, step: int) -> BatchManifest | None:
        answer = self._together(lambda: self._ask(step))
        says = str(answer) if isinstance(answer, NoBatch) else answer.digest
        heard = [data.decode() for data in self._ranks.gather(says.encode())]
        if NoBatch.STOP in heard:
            return None
        if len(set(heard)) > 1:
            raise RankMismatch(f"batch {step}", heard)
        self.ended = answer is NoBatch.END
        return None if isinstance(answer, NoBatch) else answer

    def _ask(self, step: int) -> BatchManifest | NoBatch:
        if self._stop.requested:
            return NoBatch.STOP
        if self._max_steps is not None and step > self._max_steps:
            return NoBatch.END
        return self._source.manifest(step)

    def _together(self, work: Callable[[], _T]) -> _T:
        return _ask_together(work, self._ranks, self._stop, self._health)


class Reporter:
    """Reports of the training loop. All calls are collective; the orchestrator gets each from the first rank alone."""

    def __init__(self, reports: ProgressReports, ranks: Ranks, *, stop: Shutdown, health: Health) -> None:
        self._reports = reports
        self._ranks = ranks
        self._stop = stop
        self._health = health

    def published(self, weights: PublishedWeights) -> None:
        """Report that engines can load a policy version."""
        self._together(lambda: self._reports.published(weights) if self._ranks.is_first else None)

    def trained(self, step: int) -> None:
        """Report that the optimizer has stepped on batch `step`."""
        self._together(lambda: self._reports.trained(step))

    def committed(self, step: int) -> None:
        """A durable checkpoint contains `step`: only now may the orchestrator forget it. Every rank's link must know,
        since it greets the orchestrator with it whenever it connects again."""
        self._together(lambda: self._reports.committed(step))

    def _together(self, work: Callable[[], None]) -> None:
        _ask_together(work, self._ranks, self._stop, self._health)


def _ask_together(work: Callable[[], _T], ranks: Ranks, stop: Shutdown, health: Health) -> _T:
    """Waiting for another rank's answer is not a stall: its link has a deadline."""

    def on_wait(missing: Sequence[int]) -> None:
        health.progress()
        what = f"rank {', '.join(map(str, missing))} to hear from the orchestrator"
        health.waiting_for(what, peer="orchestrator")

    try:
        return ranks.wait_together(work, on_wait, stop)
    finally:
        health.waiting_for("")
