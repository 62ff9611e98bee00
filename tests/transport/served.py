"""`Served`: a real batch server on its own event loop in a thread, so that tests can use the blocking client."""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import TypeVar

import uvloop

from transport.outbox import Outbox
from transport.server import BatchServer

_T = TypeVar("_T")


class Served:
    """`with Served(outbox) as served:` serves on a free port; `served.call(coroutine)` runs on the server's loop."""

    def __init__(self, outbox: Outbox, endpoint: str = "tcp://127.0.0.1:0", **options: object) -> None:
        self._outbox, self._endpoint, self._options = outbox, endpoint, options
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.server: BatchServer

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def call(self, coroutine: Coroutine[object, object, _T], timeout_s: float = 10) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def __enter__(self) -> "Served":
        self._thread.start()
        assert self._ready.wait(10)
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with BatchServer(self._endpoint, self._outbox, **self._options) as self.server:  # type: ignore[arg-type]
            self._serving = asyncio.ensure_future(self.server.serve())
            self._ready.set()
            await self._serving
