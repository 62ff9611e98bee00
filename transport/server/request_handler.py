"""`RequestHandler`: takes each message of a rank and sees that it is answered, one request per rank at a time.

What touches the disk runs in a thread, so that heartbeats are answered meanwhile. A request for a batch that is still
to be assembled is parked, and answered when the batch comes or after `park_s`, whichever is first.
"""

import asyncio
import time
from collections.abc import Callable

from loguru import logger

from transport.errors import CodecError, OutboxError
from transport.outbox.outbox import Outbox
from transport.server.answers import (
    TrainerReport,
    answer_hello,
    answer_manifest,
    answer_samples,
    has_fallen_back,
    has_lost_commit,
    record_report,
)
from transport.server.peers import Peer, PeerTable
from transport.server.router import Incoming, Reason, Router, one_line
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Ack,
    Bye,
    ClientMessage,
    Failure,
    GetBroadcast,
    GetManifest,
    GetSamples,
    GetWeightBytes,
    GetWeights,
    Hello,
    Limits,
    NotReady,
    Ping,
    Pong,
    Refusal,
    ServerMessage,
    Stranger,
)


class RequestHandler:
    """Answers from `outbox` through `router`; calls `notify` whenever progress or the set of peers changed."""

    def __init__(
        self,
        outbox: Outbox,
        router: Router,
        peers: PeerTable,
        limits: Limits,
        park_s: float,
        notify: Callable[[], None],
    ) -> None:
        self.waiting_for = ""
        self.last_step: int | None = None
        self._outbox = outbox
        self._router = router
        self._peers = peers
        self._limits = limits
        self._park_s = park_s
        self._notify = notify

    async def handle(self, incoming: Incoming, tasks: asyncio.TaskGroup) -> None:
        """Answer one message, now or in a task of `tasks`."""
        if self._peers.has_left(incoming.identity):
            return  # a greeting that comes again after the goodbye must not bring the rank back
        peer = self._peers.find(incoming.identity)
        if isinstance(incoming.message, Hello):
            await self._hello(incoming.identity, incoming.address, incoming.message)
        elif peer is None:
            await self._router.send(incoming.identity, incoming.address, Stranger(seq=incoming.message.seq))
        else:
            self._heard(peer)
            await self._dispatch(peer, incoming.message, tasks)

    async def sweep(self) -> None:
        """Answer parked requests whose batch has come or whose time is up, and notice ranks that fell silent."""
        now = time.monotonic()
        for peer in self._peers:
            if peer.parked is not None:
                await self._get_manifest(peer, peer.parked)
            if peer.parked is not None and now >= peer.parked_until:
                ask, peer.parked = peer.parked, None
                await self._reply(peer, NotReady(seq=ask.seq, waiting_for=self.waiting_for))
        for peer in self._peers.newly_silent(now):
            logger.warning("{} fell silent", peer.name)
            self._notify()

    async def _dispatch(self, peer: Peer, message: ClientMessage, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Ping(seq=seq):
                await self._reply(peer, Pong(seq=seq))
            case Bye(seq=seq, reason=reason):
                logger.info("{} leaves: {}", peer.name, one_line(reason))
                await self._reply(peer, Ack(seq=seq))
                self._peers.leave(peer.identity)
                self._notify()
            case GetManifest():
                await self._get_manifest(peer, message)
            case _ if peer.is_busy:
                self._router.rejections.add(Reason.BUSY, peer.address, "a second request before the first was answered")
            case GetSamples():
                peer.is_busy = True
                tasks.create_task(self._get_samples(peer, message))
            case GetWeights() | GetWeightBytes() | GetBroadcast():
                await self._reply(peer, Failure(seq=message.seq, reason="this is a batch server: it has no weights"))
            case Hello():
                raise AssertionError("Hello is handled before dispatch")
            case report:
                peer.is_busy = True
                tasks.create_task(self._record(peer, report))

    async def _hello(self, identity: bytes, address: str, hello: Hello) -> None:
        """Answered in turn, not in a task, so that a flood of greetings cannot pile up."""
        reply = answer_hello(self._outbox, self._limits, hello)
        if isinstance(reply, Refusal):
            reason = Reason.SCHEMA if hello.schema_version != SCHEMA_VERSION else Reason.RUN
            self._router.rejections.add(reason, address, reply.reason)
        else:
            if has_lost_commit(self._outbox, hello):
                await asyncio.to_thread(self._outbox.retire, hello.last_committed)
            elif self._peers.find(identity) is None and has_fallen_back(self._outbox, hello):  # not a repeated greeting
                logger.warning("the trainer goes on from step {}: its newer checkpoint is gone", hello.last_committed)
                await asyncio.to_thread(self._outbox.fall_back, hello.last_committed)
            self._welcome(identity, address, hello)
        await self._router.send(identity, address, reply)

    def _welcome(self, identity: bytes, address: str, hello: Hello) -> None:
        is_new = self._peers.find(identity) is None
        peer = self._peers.welcome(identity, address, hello, time.monotonic())
        if is_new:
            step = hello.last_committed
            saved = f"its newest checkpoint is of step {step}" if step else "it has no checkpoint yet"
            logger.info("{} of {} is here; {}", peer.name, peer.world_size, saved)
        self._notify()

    async def _get_manifest(self, peer: Peer, ask: GetManifest) -> None:
        reply = answer_manifest(self._outbox, self.last_step, ask)
        if reply is not None:
            if peer.parked is None or peer.parked.seq <= ask.seq:  # an old question that comes again ends no wait
                peer.parked = None
            await self._reply(peer, reply)
        elif peer.parked is not ask:
            peer.parked, peer.parked_until = ask, time.monotonic() + self._park_s

    async def _get_samples(self, peer: Peer, ask: GetSamples) -> None:
        reply, frames = await asyncio.to_thread(answer_samples, self._outbox, self._limits, ask)
        peer.is_busy = False
        await self._reply(peer, reply, frames)

    async def _record(self, peer: Peer, report: TrainerReport) -> None:
        try:
            await asyncio.to_thread(record_report, self._outbox, report)
            reply: ServerMessage = Ack(seq=report.seq)
        except (OutboxError, CodecError) as error:
            reply = Failure(seq=report.seq, reason=str(error))
        peer.is_busy = False
        self._notify()
        await self._reply(peer, reply)

    async def _reply(self, peer: Peer, message: ServerMessage, frames: list[memoryview] | None = None) -> None:
        if not await self._router.send(peer.identity, peer.address, message, frames):
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        self._peers.forget(peer.identity)
        self._notify()

    def _heard(self, peer: Peer) -> None:
        if not peer.alive:
            logger.info("{} is back", peer.name)
        peer.last_seen, peer.alive = time.monotonic(), True
