"""`RequestHandler`: takes each message of a rank and sees that it is answered, one request per rank at a time.

What touches the disk runs in a thread, so that heartbeats are answered meanwhile. A request for a batch that is still
to be assembled is parked, and answered when the batch comes or after `park_s`, whichever is first.

Answers are functions of the outbox and the message, without sockets and clocks. Each is the same when the question is
repeated, so a client may ask again after any fault.
"""

import asyncio
import time
from collections.abc import Callable

from loguru import logger

from transport.errors import CodecError, OutboxError, TransportError
from transport.outbox.outbox import Outbox
from transport.outbox.progress import PublishedWeights
from transport.server.peers import Peer, PeerTable
from transport.server.router import Incoming, Reason, Router, one_line
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Ack,
    Bye,
    ClientMessage,
    Committed,
    EndOfRun,
    Failure,
    GetBroadcast,
    GetManifest,
    GetSamples,
    GetWeightBytes,
    GetWeights,
    Hello,
    Limits,
    Manifest,
    NotReady,
    Ping,
    Pong,
    Refusal,
    Samples,
    ServerMessage,
    Stranger,
    Trained,
    WeightsPublished,
    Welcome,
)

_MAX_RUN_ID_CHARS = 100
"""Of a foreign run's id, what is repeated."""

Reply = tuple[ServerMessage, list[memoryview]]
TrainerReport = Trained | Committed | WeightsPublished


def foreign(run_id: str, hello: Hello) -> str | None:
    """Why a server of `run_id` cannot serve this client at all: another schema version, another run."""
    if hello.schema_version != SCHEMA_VERSION:
        return f"schema version {hello.schema_version}, this server speaks {SCHEMA_VERSION}"
    if hello.run_id != run_id:
        return f"run {hello.run_id[:_MAX_RUN_ID_CHARS]!r}, this server runs {run_id!r}"
    return None


def refusal(outbox: Outbox, limits: Limits, hello: Hello) -> str | None:
    """Why this client is not served, or None. Names both sides of whatever does not match."""
    retired, newest = outbox.progress.last_retired, outbox.next_step - 1
    if (mismatch := foreign(outbox.run_id, hello)) is not None:
        return mismatch
    if not 0 <= hello.rank < hello.world_size <= limits.max_peers:
        return f"rank {hello.rank} of {hello.world_size}, this server takes up to {limits.max_peers} ranks"
    if hello.last_committed < retired:
        return (
            f"it resumes after step {hello.last_committed}, but batches up to {retired} were committed and retired: "
            f"restore its checkpoint of step {retired} or a later one"
        )
    if hello.last_committed > newest:
        return (
            f"its checkpoint contains step {hello.last_committed}, but the newest batch of this run is {newest}: they "
            "are of different run directories, or the outbox was restored from an older copy"
        )
    return None


def answer_hello(outbox: Outbox, limits: Limits, hello: Hello) -> Welcome | Refusal:
    """`Welcome`, or `Refusal` with the reason."""
    reason = refusal(outbox, limits, hello)
    if reason is not None:
        return Refusal(seq=hello.seq, schema_version=SCHEMA_VERSION, reason=reason)
    return Welcome(seq=hello.seq, schema_version=SCHEMA_VERSION)


def has_lost_commit(outbox: Outbox, hello: Hello) -> bool:
    """Whether a welcome client's checkpoint is newer than we know: its `Committed` was lost on the way."""
    return hello.last_committed > outbox.progress.last_committed


def has_fallen_back(outbox: Outbox, hello: Hello) -> bool:
    """Whether a welcome trainer comes from an older checkpoint than it once reported. Its first rank speaks for all."""
    return hello.rank == 0 and hello.last_committed < outbox.progress.last_committed


def answer_manifest(outbox: Outbox, last_step: int | None, ask: GetManifest) -> ServerMessage | None:
    """The manifest, the end of the run, or why it cannot be; None while the batch is still to be cut."""
    if last_step is not None and ask.step > last_step:
        return EndOfRun(seq=ask.seq)
    if ask.step == outbox.next_step:
        return None
    if ask.step > outbox.next_step:
        return Failure(
            seq=ask.seq, reason=f"batch {ask.step} is ahead of this run: its next batch is {outbox.next_step}"
        )
    try:
        return Manifest(seq=ask.seq, manifest=outbox.manifest(ask.step))
    except OutboxError as error:
        return Failure(seq=ask.seq, reason=str(error))


def answer_samples(outbox: Outbox, limits: Limits, ask: GetSamples) -> Reply:
    """The frames asked for; refused if the reply would be too large, or if the file is damaged, with its path."""
    try:
        ask.indices.check()
        if ask.indices.dtype != "int32" or len(ask.indices.shape) != 1:
            return _failure(ask.seq, f"rows must be an int32 vector, got {ask.indices.dtype}{list(ask.indices.shape)}")
        rows = ask.indices.numpy()
        sizes = outbox.manifest(ask.step).columns.num_bytes.numpy()
        if rows.size and not (rows.min() >= 0 and rows.max() < len(sizes)):
            return _failure(ask.seq, f"batch {ask.step} has rows 0 to {len(sizes) - 1}; others were asked for")
        num_bytes = int(sizes[rows].sum())
        if rows.size > 1 and num_bytes > limits.max_reply_bytes:
            return _failure(ask.seq, f"{num_bytes} bytes in one reply, the limit is {limits.max_reply_bytes}")
        return Samples(seq=ask.seq), outbox.frames(ask.step, rows.tolist())
    except TransportError as error:
        return _failure(ask.seq, str(error))


def record_report(outbox: Outbox, report: TrainerReport) -> None:
    """Make what the trainer reports durable. `OutboxError` if the batch was never cut."""
    match report:
        case Trained(step=step):
            outbox.mark_trained(step)
        case Committed(step=step):
            outbox.retire(step)
        case WeightsPublished(version=version, location=path, digest=digest, canary=canary):
            if canary is not None:
                canary.check()
            outbox.mark_weights(PublishedWeights(version=version, location=path, digest=digest, canary=canary))


def _failure(seq: int, reason: str) -> Reply:
    return Failure(seq=seq, reason=reason), []


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
