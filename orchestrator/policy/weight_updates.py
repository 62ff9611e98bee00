"""`WeightUpdates`: which version is live, and the loop that brings announced weights to the engines.

A version is live when every engine in service serves it, read back with its digest (`Engine.apply_weights` does both).
Any failure leaves the old version live and is retried with back-off, always with the newest announcement: versions in
between are skipped. What was announced is kept by the outbox, so a restart starts with it. An engine that comes back
gets the weights before it gets requests (`Engine.keep_in_service`).
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from loguru import logger

from orchestrator.engines.protocol import Engine, EngineError
from runtime.errors import PeerLostError, UserError
from runtime.health.health import Health
from transport.backoff import Backoff
from transport.changes import Changes
from transport.outbox.progress import PublishedWeights
from transport.server.server import BatchServer

BACKOFF = Backoff(0.2, 10.0, jitter=(0.5, 1.0))
LOOP = "policy"

Verify = Callable[[PublishedWeights], Awaitable[None]]


class WeightUpdates:
    """`live` only grows while the process lives. `on_live` is called after each change."""

    def __init__(
        self,
        engine: Engine,
        source: BatchServer,
        health: Health,
        *,
        update_timeout_s: float,
        on_live: Callable[[], None],
        verify: Verify | None = None,
    ) -> None:
        """`verify` is called with what all engines say they serve, before it is live; what it raises ends the run."""
        self._engine = engine
        self._source = source
        self._health = health
        self._update_timeout_s = update_timeout_s
        self._on_live = on_live
        self._verify = verify
        self._applied: PublishedWeights | None = None
        self._applying = asyncio.Lock()
        self._changes = Changes()
        self.live = 0
        """The version that every engine in service serves, or a later one."""
        self.update_times: dict[str, float] = {}
        """Seconds of the last update, by phase, on the slowest engine; `total_s` is from order to proof."""
        self._problem = ""

    async def start(self, *, newest_batch: int, timeout_s: float) -> None:
        """Bring the engines to the newest announcement before anything is dispatched.

        Raises `PeerLostError` at the deadline, and `UserError` when the engines serve a version that batches up to
        `newest_batch` cannot have made: the weights of another run.
        """
        try:
            async with asyncio.timeout(timeout_s), self._kept_in_service():
                await self._start(newest_batch)
        except TimeoutError:
            raise PeerLostError(f"the engines did not take the current weights within {timeout_s:g} s") from None
        logger.info("policy version {} is live", self.live)

    @asynccontextmanager
    async def _kept_in_service(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self._engine.keep_in_service())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _start(self, newest_batch: int) -> None:
        weights = self._source.weights
        version = await self._served()
        if version > newest_batch:
            raise UserError(
                f"the engines serve version {version} but the run has only made {newest_batch} batches; restart "
                "`inference`, or choose the --run.name that its weights belong to"
            )
        if weights is None:
            return
        if version > weights.version:
            # Its announcement was on its way when this process died, and will be repeated.
            self._applied, self.live = weights, weights.version
        else:
            await self._apply_newest()

    async def _served(self) -> int:
        try:
            return (await self._engine.served()).version
        except EngineError as error:
            if self._source.weights is None:
                raise PeerLostError(f"the engines do not say what they serve: {error}") from error
            return -1  # they disagree: all get the announced version

    async def run(self) -> None:
        """Follow the announcements, and keep the engines in service, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine.keep_in_service())
            while True:
                await self._source.wait_weights(self._applied)
                async with self._applying:
                    await self._apply_newest()

    async def wait_live(self, version: int, timeout_s: float) -> None:
        """Return once `version`, or a later one, is live; `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            await self._changes.wait_for(lambda: self.live >= version)

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[int]:
        """The live version, which stays live inside the block: newer weights wait. The caller bounds the time."""
        async with self._applying:
            yield self.live

    async def _apply_newest(self) -> None:
        """Retry until a version is live that is the newest announced at that time."""
        for num_tries in itertools.count(1):
            weights = self._source.weights
            assert weights is not None, "only called after an announcement"
            what, engines = f"the engines to serve version {weights.version}", self._engine.availability.peers
            with self._health.waiting(what, peer=engines, detail=self._problem, loop=LOOP):
                if await self._apply(weights):
                    return
                await self._pause(BACKOFF.pause_s(num_tries))  # with jitter: several runs may share an engine

    async def _pause(self, seconds: float) -> None:
        """Wait before the next try; not longer than an outage lasts."""
        if self._engine.availability.is_open:
            return await asyncio.sleep(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._engine.availability.wait()

    async def _apply(self, weights: PublishedWeights) -> bool:
        started = time.monotonic()
        try:
            async with asyncio.timeout(2 * self._update_timeout_s):  # the order, and the reading back
                times = await self._engine.apply_weights(weights.location, weights.version, weights.digest)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no answer within {2 * self._update_timeout_s:g} s"
            self._problem = reason
            logger.warning("version {} is not live, {} stays: {}", weights.version, self.live, reason)
            return False
        self._problem = ""
        if self._verify is not None:
            await self._verify(weights)
        self._applied, self.live = weights, weights.version
        self.update_times = {"total_s": time.monotonic() - started}
        if times is not None:
            self.update_times |= msgspec.structs.asdict(times)
        logger.debug("policy version {} is live: {}", weights.version, self.update_times)
        self._health.progress(version=weights.version)
        self._changes.notify()
        self._on_live()
        return True
