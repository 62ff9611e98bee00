"""`EngineThread`: owns the decoder and runs it, so that HTTP answers while the model computes."""

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from inference.torch_engine.decoder import Decoder
from inference.torch_engine.slots import FinishedSequence

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
