"""The other side of the wire, in a thread: a trainer without a model, and a batch server without an orchestrator."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import uvloop

from tests.support.waiting import until
from transport.client.client import BatchClient
from transport.errors import TransportError
from transport.outbox.outbox import Outbox
from transport.security.keys import CurveKeys
from transport.server.server import BatchServer
from transport.wire.sample import TrainingSample

DEADLINE_S = 60.0
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


@dataclass
class FakeTrainer:
    """Pulls batches with the real client in a thread; "trains" by announcing the next version at once."""

    endpoint: str
    run_id: str = "toy"
    commit_every: int = 1
    keys: CurveKeys | None = None
    may_train: int | None = None
    """The last step that it trains for now; None: all."""
    digests: dict[int, str] = field(default_factory=dict)
    batches: dict[int, list[TrainingSample]] = field(default_factory=dict)
    last_committed: int = 0
    error: TransportError | None = None

    def train(self) -> None:
        """Until the run ends."""
        try:
            with BatchClient(
                self.endpoint,
                self.run_id,
                keys=self.keys,
                last_committed=self.last_committed,
                lost_timeout_s=DEADLINE_S,
                heartbeat_s=0.2,
            ) as client:
                self._train(client)
        except TransportError as error:
            self.error = error

    def _train(self, client: BatchClient) -> None:
        step = client.hello()
        while (manifest := client.manifest(step)) is not None:
            self.batches[step] = client.samples(manifest, range(manifest.num_samples))
            self.digests[step] = manifest.digest
            until(lambda step=step: self.may_train is None or step <= self.may_train, DEADLINE_S)
            client.weights_published(step, *self._publish(step))
            client.trained(step)
            if step % self.commit_every == 0:
                self._commit(client, step)
            step += 1
        self._commit(client, step - 1)

    def _publish(self, step: int) -> tuple[str, str]:
        """Where the weights of `step` are, and their digest."""
        return f"weights/v{step}", f"digest-{step}"

    def _commit(self, client: BatchClient, step: int) -> None:
        client.committed(step)
        self.last_committed = step


@contextmanager
def training(trainer: FakeTrainer) -> Iterator[FakeTrainer]:
    """Run the trainer in a thread; it must have come to its end when the block does."""
    thread = threading.Thread(target=trainer.train, daemon=True)
    thread.start()
    yield trainer
    thread.join(timeout=DEADLINE_S)
    assert not thread.is_alive(), "the fake trainer hangs"
    assert trainer.error is None, trainer.error
