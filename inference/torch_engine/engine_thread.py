"""`EngineThread`: owns the decoder and runs it, so that HTTP answers while the model computes."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from inference.torch_engine.decoder import Decoder
from inference.torch_engine.inbox import Abort, Add, Command, Inbox, Score, Stop, Swap
from inference.torch_engine.sequence import Finished

_T = TypeVar("_T")
_IDLE_WAIT_S = 0.5
"""How often an idle engine shows that it lives."""


class Listener(Protocol):
    """Hears of the engine's thread, in the event loop."""

    def finished(self, finished: list[Finished]) -> None:
        """These sequences are done."""
        ...

    def died(self, error: Exception) -> None:
        """The thread ended by `error`; nothing will finish any more."""
        ...


class EngineThread:
    """Loop: take commands, decode one step, deliver. Waits only for commands, and only when there is no work."""

    def __init__(self, decoder: Decoder, inbox: Inbox, listener: Listener, on_progress: Callable[[], None]) -> None:
        self._decoder = decoder
        self._inbox = inbox
        self._listener = listener
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False if it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except Exception as error:  # whatever it was, the process must end and say so
            self._tell(partial(self._listener.died, error))

    def _turn(self) -> None:
        for command in self._inbox.take(0 if self._decoder.has_work else _IDLE_WAIT_S):
            self._obey(command)
            self._on_progress()  # a thousand sequences to score take longer than a step
        if self._decoder.has_work:
            finished = self._decoder.step()
            if finished:
                self._tell(partial(self._listener.finished, finished))
        self._on_progress()

    def _obey(self, command: Command) -> None:
        match command:
            case Add(sequence):
                self._decoder.add(sequence)
            case Abort(key):
                self._decoder.abort(key)
            case Swap(weights, reply):
                started = time.monotonic()
                served = self._decoder.swap(weights)
                self._answer(reply, (served, time.monotonic() - started))
            case Score(job, reply):
                if not reply.done():  # nobody waits for it any more
                    self._answer(reply, self._decoder.score(job))
            case Stop():
                self._stopped = True

    def _answer(self, reply: "asyncio.Future[_T]", value: _T) -> None:
        self._tell(lambda: None if reply.done() else reply.set_result(value))

    def _tell(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the process is ending and nobody listens
            self._stopped = True
