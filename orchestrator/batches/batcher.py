"""`Batcher`: takes complete batches from the assembler, makes them durable, and announces them, one at a time.

The order of writes is derived in `state.py`. Blocking work (encoding, fsync) runs in threads. A batch whose writing
has begun is finished even when the batcher is cancelled, so that a clean shutdown never stands between two writes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from loguru import logger
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from orchestrator.batches.assembler import BatchAssembler, to_samples
from orchestrator.records.history import History
from orchestrator.records.ledger import Ledger
from orchestrator.records.rollout_log import RolloutLog
from orchestrator.records.state import BatchState, save_state
from orchestrator.values.group import AssembledBatch, check_staleness
from runtime.errors import StorageError
from runtime.health.health import Health
from transport.backoff import Backoff
from transport.changes import Changes
from transport.errors import OutboxError
from transport.server.server import BatchServer
from transport.wire.codec import EncodedBatch, build_batch
from transport.wire.ledger import CompletedPositions

STORE_TRIES = 5
"""Tries to make a batch durable before the run ends with exit code 74."""
STORE_BACKOFF = Backoff(0.5, 4.0)
LOOP = "batcher"

_T = TypeVar("_T")


def encoded_batch(run_id: str, batch: AssembledBatch) -> EncodedBatch:
    """All samples of the trained rollouts of `batch`, in its order."""
    samples = [
        sample
        for scored in batch.trained
        for index, rollout, advantage in scored.trainable
        for sample in to_samples(
            rollout,
            advantage=advantage,
            run_id=run_id,
            group_id=scored.id,
            trajectory_id=f"{scored.id}#{index}",
            weights=scored.weights,
        )
    ]
    return build_batch(run_id, batch.step, samples)


class BatchWriter:
    """Everything that must be on disk before batch N is. Blocking."""

    def __init__(
        self,
        run_id: str,
        order: str,
        done: CompletedPositions,
        state_path: Path,
        ledger: Ledger,
        history: History | None,
        rollout_log: RolloutLog,
    ) -> None:
        self.done = done
        """What is in a durable batch."""
        self._run_id = run_id
        self._order = order
        self._state_path = state_path
        self._ledger = ledger
        self._history = history
        self._rollout_log = rollout_log

    def prepare(self, batch: AssembledBatch) -> EncodedBatch:
        """Save all that must be there first; the batch that may now be stored. Safe to repeat. Raises `OSError`."""
        encoded = encoded_batch(self._run_id, batch)
        self._rollout_log.write(batch)
        self._ledger.flush()
        if self._history is not None:
            self._history.write(batch)
        save_state(self._state_path, BatchState.of(self._run_id, self._order, batch.step, self.done, batch.done))
        return encoded


class Batcher:
    """`notify` wakes it: a group is final. `on_shipped` is awaited when a batch is durable and announced."""

    def __init__(
        self,
        assembler: BatchAssembler,
        server: BatchServer,
        ledger: Ledger,
        writer: BatchWriter,
        health: Health,
        *,
        max_ahead: int,
        max_steps: int,
        on_shipped: Callable[[AssembledBatch], Awaitable[None]],
    ) -> None:
        self._assembler = assembler
        self._server = server
        self._ledger = ledger
        self._writer = writer
        self._health = health
        self._max_ahead = max_ahead
        self._max_steps = max_steps
        self._on_shipped = on_shipped
        self._changes = Changes()
        self.waited_for_trainer_s = 0.0
        """Time that complete batches waited for the trainer, in all."""

    def notify(self) -> None:
        """A group is final: look again whether a batch is complete."""
        self._changes.notify()

    async def run(self) -> None:
        """Ship until batch `max_steps` is durable."""
        while self._server.outbox.next_step <= self._max_steps:
            batch = await self._next_batch()
            await self._room()
            await _to_the_end(self._ship(batch))
            await self._on_shipped(batch)

    async def _next_batch(self) -> AssembledBatch:
        if not self._assembler.complete:
            with self._health.waiting(f"groups for batch {self._assembler.next_step}", loop=LOOP):
                await self._changes.wait_for(lambda: self._assembler.complete)
        return self._assembler.complete.popleft()

    async def _room(self) -> None:
        started = time.monotonic()
        what = f"the trainer to train step {self._server.last_trained + 1}"
        detail = f"{self._max_ahead} batches may be untrained"
        with self._health.waiting(what, peer="trainer", detail=detail, loop=LOOP):
            await self._server.until(lambda: self._server.outbox.num_untrained < self._max_ahead)
        self.waited_for_trainer_s += time.monotonic() - started

    async def _ship(self, batch: AssembledBatch) -> None:
        await asyncio.to_thread(check_staleness, batch, self._assembler.policy.max_staleness)
        self._ledger.settled(batch)
        encoded = await _stored(lambda: asyncio.to_thread(self._writer.prepare, batch), batch.step)
        await _stored(lambda: self._server.publish(encoded), batch.step)
        self._writer.done = batch.done


async def _stored(act: Callable[[], Awaitable[_T]], step: int) -> _T:
    """Try again while the disk refuses; `StorageError` when it keeps refusing."""
    tries = AsyncRetrying(
        stop=stop_after_attempt(STORE_TRIES),
        retry=retry_if_exception_type((OSError, OutboxError)),
        wait=lambda state: STORE_BACKOFF.pause_s(state.attempt_number),
        before_sleep=lambda state: logger.warning(
            "batch {} is not stored yet (try {}): {}", step, state.attempt_number, _error(state)
        ),
        reraise=True,
    )

    async def once() -> _T:  # tenacity awaits only what is declared `async`
        return await act()

    try:
        return await tries(once)
    except (OSError, OutboxError) as error:
        raise StorageError(f"batch {step} could not be stored in {STORE_TRIES} tries: {error}") from error


def _error(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


async def _to_the_end(work: Awaitable[None]) -> None:
    """Finish `work` even when cancelled meanwhile, then let the cancellation go on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:  # once by a loop that failed, say, and again by a stop signal
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
