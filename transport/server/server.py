"""`BatchServer`: the orchestrator's side of the link. Serves the outbox to trainer ranks.

    async with BatchServer("tcp://127.0.0.1:29600", outbox) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())          # runs until cancelled; a bug in here ends the task group
        await server.until(lambda: outbox.num_untrained < max_ahead)
        await server.publish(batch)                # durable first, then announced
        weights = await server.wait_weights(seen)  # the newest announcement that differs from `seen`
        server.end(last_step)                      # ranks that ask beyond it get EndOfRun
        await server.until(lambda: server.last_committed >= last_step)

What the trainer reports is state (`outbox.progress`), not a queue of events: bounded by construction, the same after a
repeat, and still there after a restart. The event loop itself answers heartbeats, so a loop that is stuck looks dead.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from loguru import logger

from transport.changes import Changes
from transport.errors import FrameTooLarge
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.security.exposure import check_bind, missing_keys_reminder, reminding_of_exposure
from transport.security.keys import CurveKeys
from transport.server.peers import Peer, PeerTable
from transport.server.request_handler import RequestHandler
from transport.server.router import Router
from transport.wire.codec import EncodedBatch
from transport.wire.messages import Limits


class BatchServer:
    """Serves `outbox` on `endpoint` (port 0: any free one; `endpoint` says which after entering).

    `SecurityError` at once if `endpoint` is reachable from other machines and there are neither `keys` nor `insecure`.
    """

    def __init__(
        self,
        endpoint: str,
        outbox: Outbox,
        *,
        keys: CurveKeys | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        peer_timeout_s: float = 3.0,
        park_s: float = 1.0,
    ) -> None:
        check_bind(endpoint, has_keys=keys is not None, insecure=insecure)
        self.endpoint = endpoint
        self.outbox = outbox
        self._has_keys = keys is not None
        self._limits = limits or Limits()
        self._park_s = park_s
        self._peers = PeerTable(peer_timeout_s)
        self._changes = Changes()
        self._router = Router(keys, self._limits, peer_timeout_s)
        self._handler = RequestHandler(outbox, self._router, self._peers, self._limits, park_s, self._changes.notify)

    async def __aenter__(self) -> "BatchServer":
        """Bind. `BindError` if the address is taken."""
        self.endpoint = self._router.bind(self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the socket; ranks connect to the next server on this endpoint by themselves."""
        self._router.close()

    async def serve(self) -> None:
        """Answer until cancelled."""
        with reminding_of_exposure(missing_keys_reminder(self.endpoint, has_keys=self._has_keys)):
            async with asyncio.TaskGroup() as tasks:
                self._router.start_guards(tasks)
                tasks.create_task(self._keep_time())
                while True:
                    incoming = await self._router.receive()
                    if incoming is not None:
                        await self._handler.handle(incoming, tasks)
                    await asyncio.sleep(0)  # a flood of ready messages must not starve the other tasks

    async def publish(self, batch: EncodedBatch) -> None:
        """Store `batch` durably, then announce it. `FrameTooLarge` or `OutboxError`: it was not stored."""
        largest, limit = int(batch.manifest.columns.num_bytes.numpy().max()), self._limits.max_frame_bytes
        if largest > limit:
            raise FrameTooLarge(f"batch {batch.manifest.step} has a sample of {largest} bytes, the limit is {limit}")
        await asyncio.to_thread(self.outbox.put, batch)
        await self.announce(batch.manifest.step)

    async def announce(self, step: int) -> None:
        """Batch `step` is in the outbox: answer the ranks that wait for it now, not at the next sweep."""
        logger.debug("batch {} is in the outbox", step)
        await self._handler.sweep()
        self._changes.notify()

    def end(self, last_step: int) -> None:
        """There will be no batch after `last_step`."""
        self._handler.last_step = last_step

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate()` is true; it is asked whenever progress or the set of ranks has changed."""
        await self._changes.wait_for(predicate)

    async def wait_weights(self, seen: PublishedWeights | None) -> PublishedWeights:
        """The newest announcement, once it differs from `seen`."""
        await self.until(lambda: self.weights not in (None, seen))
        assert self.weights is not None
        return self.weights

    @property
    def waiting_for(self) -> str:
        """What the orchestrator waits for; ranks are told while they wait. Set it freely."""
        return self._handler.waiting_for

    @waiting_for.setter
    def waiting_for(self, value: str) -> None:
        self._handler.waiting_for = value

    @property
    def last_trained(self) -> int:
        """Newest step that the optimizer used; 0 before the first."""
        return self.outbox.progress.last_trained

    @property
    def last_committed(self) -> int:
        """Newest step in a durable checkpoint; 0 before the first."""
        return self.outbox.progress.last_committed

    @property
    def weights(self) -> PublishedWeights | None:
        return self.outbox.progress.weights

    def peers(self) -> tuple[Peer, ...]:
        """Connected ranks, in ascending order."""
        return tuple(self._peers)

    def rejections(self) -> dict[str, int]:
        """How many messages and connections were rejected, by reason, for metrics."""
        return self._router.rejections.counts()

    async def _keep_time(self) -> None:
        while True:
            await self._handler.sweep()
            await asyncio.sleep(self._park_s / 4)
