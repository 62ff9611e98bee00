"""`TorchEngine`: the engine as the event loop sees it. Jobs in, completions out, weights swapped in between.

`EngineThread` owns the decoder and runs it, so that HTTP answers while the model computes.
"""

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from inference.api.engine import EngineLimits, EngineStats
from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.errors import NonFiniteLogits, QueueFull, Unavailable
from inference.torch_engine.decoder import Decoder, stream_seed
from inference.torch_engine.slots import EngineSequence, FinishedSequence
from inference.weights.publish import VerifiedWeights
from inference.weights.receiver import WeightReceiver
from transport.wire.generation import ServedWeights, UpdateTimes

_T = TypeVar("_T")
_IDLE_WAIT_S = 0.5
"""How often an idle engine shows that it lives."""
_JOIN_S = 10.0
"""How long the thread may take to finish the step it is in."""


class EngineThread:
    """Runs what it is given, in order, between two decode steps. Waits only when there is nothing to decode.

    `on_finished` and `on_death` are called in the event loop, `on_progress` in the thread. The queue is bounded by its
    one sender: `TorchEngine` admits a limited number of open jobs, and awaits every call.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        on_finished: Callable[[list[FinishedSequence]], None],
        on_death: Callable[[Exception], None],
        on_progress: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._on_finished = on_finished
        self._on_death = on_death
        self._on_progress = on_progress
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def post(self, order: Callable[[], object]) -> None:
        """Run `order` in the thread. An error in it ends the engine."""
        self._orders.put(order)

    def call(self, function: Callable[[], _T]) -> "asyncio.Future[_T]":
        """The result of `function`, which runs in the thread, or not at all once the caller has gone."""
        reply: asyncio.Future[_T] = self._loop.create_future()
        self.post(lambda: None if reply.done() else self._answer(reply, function()))
        return reply

    def stop(self) -> None:
        """End the thread after the step it is in. Blocks."""
        self.post(partial(setattr, self, "_stopped", True))
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:  # whatever it was, the process must end and say so
            self._tell(partial(self._on_death, error))

    def _turn(self) -> None:
        for order in self._take():
            order()
            self._on_progress()  # a thousand sequences to score take longer than a step
        if self._decoder.has_work:
            finished = self._decoder.step()
            if finished:
                self._tell(partial(self._on_finished, finished))
        self._on_progress()

    def _take(self) -> list[Callable[[], object]]:
        """The orders that are there now, and no later ones: those could keep the decoder waiting for ever."""
        try:
            first = self._orders.get(block=not self._decoder.has_work, timeout=_IDLE_WAIT_S)
        except queue.Empty:
            return []
        return [first, *(self._orders.get_nowait() for _ in range(self._orders.qsize()))]

    def _answer(self, reply: "asyncio.Future[_T]", value: _T) -> None:
        self._tell(lambda: None if reply.done() else reply.set_result(value))

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the process is ending, no caller is left
            self._stopped = True


_SEED_MASK = 2**64 - 1


class TorchEngine:
    """Implements `InferenceEngine`."""

    def __init__(
        self,
        decoder: Decoder,
        limits: EngineLimits,
        *,
        eos_token_ids: frozenset[int],
        seed: int,
        receiver: WeightReceiver,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.failure: Exception | None = None
        self.last_update: UpdateTimes | None = None
        self._decoder = decoder
        self._seed = seed
        self._receiver = receiver
        self._keys = itertools.count()
        self._open: dict[int, asyncio.Future[Completion]] = {}
        self._replies: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._ended = asyncio.Event()
        self._swapping = asyncio.Lock()
        self._thread = EngineThread(decoder, on_finished=self._finished, on_death=self.died, on_progress=on_progress)

    @property
    def served(self) -> ServedWeights:
        """Version and digest of the tensors that the engine computes with."""
        return self._decoder.served

    @property
    def stats(self) -> EngineStats:
        running = self._decoder.num_running
        return EngineStats(
            running=running,
            waiting=max(0, len(self._open) - running),
            swapping=self._swapping.locked() and bool(self._replies),
            decode_steps=self._decoder.num_steps,
            sampled_tokens=self._decoder.num_sampled_tokens,
            prefilled_tokens=self._decoder.num_prefilled_tokens,
        )

    async def generate(self, job: Job) -> Completion:
        """Run a job that fits `limits`. Cancelling frees its slot. Raises `QueueFull`, `Unavailable` or
        `NonFiniteLogits`."""
        self._check_open()
        if len(self._open) >= self.limits.max_batch_size + self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests are waiting already: try again later")
        sequence = self._sequence(job)
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[sequence.key] = done
        self._thread.post(partial(self._decoder.add, sequence))
        try:
            return await done
        finally:
            if self._open.pop(sequence.key, None) is not None:  # cancelled: the thread still works on it
                self._thread.post(partial(self._decoder.abort, sequence.key))

    async def score(self, job: ScoreJob) -> Scores:
        self._check_open()
        if len(self._replies) >= self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} sequences wait to be scored already: try again later")
        scores = await self._ask(partial(self._decoder.score, job))
        if isinstance(scores, NonFiniteLogits):
            raise scores
        return scores

    async def read_served(self) -> ServedWeights:
        """The same as `served`: the decoder holds the tensors in this process, no worker has to be asked."""
        return self.served

    async def apply_weights(self, location: str, version: int) -> ServedWeights:
        async with self._swapping:
            self._check_open()
            started = time.monotonic()
            given_up = threading.Event()
            try:
                weights = await asyncio.to_thread(self._receive, str(location), version, given_up)
            finally:
                given_up.set()  # a caller that went away leaves no transfer behind
            received = time.monotonic()
            served, apply_s = await self._ask(partial(self._swap, weights))
            pause_s = max(0.0, time.monotonic() - received - apply_s)
            self.last_update = UpdateTimes(transfer_s=received - started, pause_s=pause_s, apply_s=apply_s)
            return served

    async def stop(self, grace_s: float) -> None:
        """Take no more jobs, give the open ones `grace_s` to finish, end the rest with `Unavailable`. Idempotent."""
        self._stopping = True
        pending = list(self._open.values())
        if pending and self.failure is None:
            await asyncio.wait(pending, timeout=grace_s)
        self._fail_open(Unavailable("the server is stopping"))
        await asyncio.to_thread(self._thread.stop)
        self._ended.set()

    async def ended(self) -> None:
        """Return when the engine's thread has ended, by `stop` or by death."""
        await self._ended.wait()

    def _finished(self, finished: list[FinishedSequence]) -> None:
        for end in finished:
            done = self._open.pop(end.key, None)
            if done is None or done.done():
                continue
            if isinstance(end.result, Completion):
                done.set_result(end.result)
            else:
                done.set_exception(end.result)

    def died(self, error: Exception) -> None:
        """The thread ended by `error`; nothing will finish any more."""
        self.failure = error
        self._fail_open(Unavailable(f"the engine died: {error!r}"))
        self._ended.set()

    def _sequence(self, job: Job) -> EngineSequence:
        key = next(self._keys)
        return EngineSequence(
            key=key,
            job=job,
            seed=stream_seed(self._seed, key) if job.seed is None else job.seed & _SEED_MASK,
            stop_ids=self.eos_token_ids | job.stop_token_ids,
            limit=min(len(job.prompt) + job.max_tokens, self.limits.max_model_len),
        )

    def _receive(self, location: str, version: int, given_up: threading.Event) -> VerifiedWeights:
        return self._decoder.loadable(self._receiver.receive(location, version, given_up))

    def _swap(self, weights: VerifiedWeights) -> tuple[ServedWeights, float]:
        """What is served afterwards, and in how many seconds the weights were put in. In the thread."""
        started = time.monotonic()
        return self._decoder.swap(weights), time.monotonic() - started

    async def _ask(self, function: Callable[[], _T]) -> _T:
        self._check_open()  # no thread, no reply: the engine may have ended while weights were fetched
        reply = self._thread.call(function)
        self._replies.add(reply)
        try:
            return await reply
        finally:
            self._replies.discard(reply)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise Unavailable(f"the engine died: {self.failure!r}")
        if self._stopping:
            raise Unavailable("the server is stopping")

    def _fail_open(self, error: Unavailable) -> None:
        for future in [*self._open.values(), *self._replies]:
            if not future.done():
                future.set_exception(error)
        self._open.clear()
