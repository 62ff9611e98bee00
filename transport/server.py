"""`BatchServer`: the orchestrator's side of the link. Owns the ROUTER socket; answers trainer ranks from the outbox.

    async with BatchServer("tcp://127.0.0.1:29600", outbox) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())          # runs until cancelled; a bug in here ends the task group
        await server.wait_untrained_below(max_ahead)
        await server.publish(batch)                # durable first, then announced
        weights = await server.wait_weights(seen)  # the newest announcement that differs from `seen`
        server.end(last_step)                      # ranks that ask beyond it get EndOfRun
        await server.wait_committed(last_step)

What the trainer reports is state (`outbox.progress`), not a queue of events: bounded by construction, the same after a
repeat, and still there after a restart. The event loop itself answers heartbeats, so a loop that is stuck looks dead.
"""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

import zmq
import zmq.asyncio
from loguru import logger

from transport.allow_list import AllowList
from transport.answers import Report, answer_hello, answer_manifest, answer_samples, record_report
from transport.batch import EncodedBatch
from transport.codec import decode_client_message, encode, foreign_greeting
from transport.errors import BindError, CodecError, FrameTooLarge, OutboxError, PeerTimeout
from transport.limits import Limits
from transport.manifest import SCHEMA_VERSION
from transport.messages import (
    Ack,
    Bye,
    ClientMessage,
    Failure,
    GetManifest,
    GetSamples,
    Hello,
    NotReady,
    Ping,
    Pong,
    Refusal,
    ServerMessage,
    Stranger,
)
from transport.outbox import Outbox
from transport.peers import Peer, PeerStatus, PeerTable
from transport.progress import PublishedWeights
from transport.rejections import Reason, Rejections
from transport.security import CurveKeys, check_bind, is_local
from transport.sockets import HANDSHAKE_FAILURES, router

_INSECURE_WARNING_S = 60.0


class BatchServer:
    """Serves `outbox` on `endpoint` (port 0 or `*`: any free one, see `endpoint` after entering)."""

    def __init__(
        self,
        endpoint: str,
        outbox: Outbox,
        *,
        keys: CurveKeys | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        peer_timeout_s: float = 5.0,
        park_s: float = 1.0,
    ) -> None:
        check_bind(endpoint, keys, insecure)
        self.endpoint = endpoint
        self.outbox = outbox
        self.waiting_for = ""
        """What the orchestrator waits for; ranks are told while they wait. Set it freely."""
        self.rejections = Rejections()
        self._keys = keys
        self._limits = limits or Limits()
        self._peer_timeout_s = peer_timeout_s
        self._park_s = park_s
        self._peers = PeerTable(peer_timeout_s)
        self._last_step: int | None = None
        self._changed = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._allow_list: AllowList | None = None
        self._socket = router(self._context, keys, self._limits, peer_timeout_s)

    async def __aenter__(self) -> "BatchServer":
        """Bind. `BindError` if the address is taken."""
        if self._keys is not None:
            self._allow_list = AllowList(self._context, self._keys, self.rejections)
        try:
            self._socket.bind(self.endpoint.replace(":0", ":*") if self.endpoint.endswith(":0") else self.endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise BindError(f"cannot serve batches on {self.endpoint}: {error.strerror}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the socket; ranks will reconnect to the next server on this endpoint."""
        self._close()

    # --- what the orchestrator does -------------------------------------------------------------------------------

    async def publish(self, batch: EncodedBatch) -> None:
        """Store `batch` durably, then announce it. `FrameTooLarge` or `OutboxError`: it was not stored."""
        largest, limit = max(map(len, batch.frames)), self._limits.max_frame_bytes
        if largest > limit:
            raise FrameTooLarge(f"batch {batch.manifest.step} has a sample of {largest} bytes, the limit is {limit}")
        await asyncio.to_thread(self.outbox.put, batch)
        await self.announce(batch.manifest.step)

    async def announce(self, step: int) -> None:
        """Batch `step` is in the outbox: answer the ranks that wait for it."""
        for peer in self._peers:
            if peer.parked is not None and peer.parked.step <= step:
                await self._get_manifest(peer, peer.parked)
        self._notify()

    def end(self, last_step: int) -> None:
        """There will be no batch after `last_step`."""
        self._last_step = last_step

    async def wait_untrained_below(self, num_batches: int, timeout_s: float | None = None) -> None:
        """Return once fewer than `num_batches` batches are untrained; `PeerTimeout` after `timeout_s`."""
        await self._wait_until(lambda: self.outbox.num_untrained < num_batches, "a batch to be trained", timeout_s)

    async def wait_committed(self, step: int, timeout_s: float | None = None) -> None:
        """Return once a durable checkpoint contains `step`; `PeerTimeout` after `timeout_s`."""
        await self._wait_until(lambda: self.last_committed >= step, f"step {step} to be committed", timeout_s)

    async def wait_weights(self, seen: PublishedWeights | None, timeout_s: float | None = None) -> PublishedWeights:
        """The newest announcement, once it differs from `seen`; `PeerTimeout` after `timeout_s`."""
        await self._wait_until(lambda: self.weights not in (None, seen), "new weights", timeout_s)
        assert self.weights is not None
        return self.weights

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
        """The newest weight announcement."""
        return self.outbox.progress.weights

    def peers(self) -> tuple[PeerStatus, ...]:
        """Connected ranks, for `/health`."""
        return self._peers.status(time.monotonic())

    # --- the loop -------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sweep())
            tasks.create_task(self._watch_handshakes())
            if self._allow_list is not None:
                tasks.create_task(self._allow_list.serve())
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                await self._receive(frames, tasks)
                await asyncio.sleep(0)  # a flood of ready messages must not starve the other tasks

    async def _receive(self, frames: list[zmq.Frame], tasks: asyncio.TaskGroup) -> None:
        identity, address = frames[0].bytes, _address(frames[0])
        message = await self._decode(identity, address, frames)
        if message is None:
            return
        peer = self._peers.find(identity)
        if isinstance(message, Hello):
            tasks.create_task(self._hello(identity, address, message))
        elif peer is None:
            await self._send(identity, Stranger(seq=message.seq))
        else:
            self._heard(peer)
            await self._dispatch(peer, message, tasks)

    async def _decode(self, identity: bytes, address: str, frames: list[zmq.Frame]) -> ClientMessage | None:
        if len(frames) != 2:
            self.rejections.add(Reason.GARBAGE, address, f"a message of {len(frames)} frames")
            return None
        head = frames[1].buffer
        if head.nbytes > self._limits.max_request_bytes:
            self.rejections.add(Reason.OVERSIZE, address, f"a request of {head.nbytes} bytes")
            return None
        try:
            return decode_client_message(head)
        except CodecError as error:
            await self._refuse_garbage(identity, address, head, error)
            return None

    async def _refuse_garbage(self, identity: bytes, address: str, head: memoryview, error: CodecError) -> None:
        greeting = foreign_greeting(head)
        if greeting is None:
            self.rejections.add(Reason.GARBAGE, address, str(error)[:200])
            return
        seq, version = greeting
        reason = f"schema version {version}, this server speaks {SCHEMA_VERSION}"
        self.rejections.add(Reason.SCHEMA, address, reason)
        await self._send(identity, Refusal(seq=seq, schema_version=SCHEMA_VERSION, reason=reason))

    async def _dispatch(self, peer: Peer, message: ClientMessage, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Ping(seq=seq, waiting_for=waiting_for):
                peer.waiting_for = waiting_for
                await self._send(peer.identity, Pong(seq=seq, waiting_for=self.waiting_for))
            case Bye(seq=seq, reason=reason):
                logger.info("{} leaves: {}", peer.name, reason[:200])
                await self._send(peer.identity, Ack(seq=seq))
                self._peers.forget(peer.identity)
                self._notify()
            case GetManifest():
                peer.waiting_for = f"batch {message.step}"
                await self._get_manifest(peer, message)
            case _ if peer.is_busy:
                self.rejections.add(Reason.BUSY, peer.address, "a second request before the first was answered")
            case GetSamples():
                peer.is_busy = True
                tasks.create_task(self._get_samples(peer, message))
            case Hello():
                raise AssertionError("Hello is handled before dispatch")
            case report:
                peer.is_busy = True
                tasks.create_task(self._record(peer, report))

    # --- one method per request; those that touch the disk do so in a thread ---------------------------------------

    async def _hello(self, identity: bytes, address: str, hello: Hello) -> None:
        reply = await asyncio.to_thread(answer_hello, self.outbox, self._limits, hello)
        if isinstance(reply, Refusal):
            reason = Reason.SCHEMA if hello.schema_version != SCHEMA_VERSION else Reason.RUN
            self.rejections.add(reason, address, reply.reason)
        else:
            peer = self._peers.welcome(identity, address, hello, time.monotonic())
            logger.info("{} of {} is here; it continues with step {}", peer.name, peer.world_size, reply.next_step)
            self._notify()
        await self._send(identity, reply)

    async def _get_manifest(self, peer: Peer, ask: GetManifest) -> None:
        reply = answer_manifest(self.outbox, self._last_step, ask)
        if reply is None:
            if peer.parked is not ask:
                peer.parked, peer.parked_until = ask, time.monotonic() + self._park_s
            return
        peer.parked = None
        await self._send(peer.identity, reply)

    async def _get_samples(self, peer: Peer, ask: GetSamples) -> None:
        reply, frames = await asyncio.to_thread(answer_samples, self.outbox, self._limits, ask)
        peer.is_busy = False
        await self._send(peer.identity, reply, frames)

    async def _record(self, peer: Peer, report: Report) -> None:
        try:
            await asyncio.to_thread(record_report, self.outbox, report)
            reply: ServerMessage = Ack(seq=report.seq)
        except OutboxError as error:
            reply = Failure(seq=report.seq, reason=str(error))
        peer.is_busy = False
        self._notify()
        await self._send(peer.identity, reply)

    async def _send(self, identity: bytes, message: ServerMessage, frames: list[bytes] | None = None) -> None:
        """Send or drop: a peer that is gone or does not read asks again when it is back."""
        try:
            await self._socket.send_multipart([identity, encode(message), *(frames or ())], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.rejections.add(Reason.UNREACHABLE, identity.hex(), "its queue is full: it asks and does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.rejections.add(Reason.UNREACHABLE, identity.hex(), "the connection is gone")
            self._peers.forget(identity)

    # --- time and changes -----------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Answer parked requests whose time is up, and notice peers that fell silent."""
        next_warning = time.monotonic()
        while True:
            await asyncio.sleep(self._park_s / 4)
            now = time.monotonic()
            for peer in self._peers:
                if peer.parked is not None and now >= peer.parked_until:
                    ask, peer.parked = peer.parked, None
                    not_ready = NotReady(seq=ask.seq, step=ask.step, waiting_for=self.waiting_for)
                    await self._send(peer.identity, not_ready)
            for peer in self._peers.silent_since(now):
                logger.warning("{} has been silent for more than {} s", peer.name, self._peer_timeout_s)
                self._notify()
            if self._keys is None and not is_local(self.endpoint) and now >= next_warning:
                next_warning = now + _INSECURE_WARNING_S
                logger.warning("{} has no keys and is reachable from other machines (insecure = true)", self.endpoint)

    async def _watch_handshakes(self) -> None:
        monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        while True:
            await monitor.recv_multipart()
            self.rejections.add(
                Reason.HANDSHAKE, "a connection", "it broke off while greeting: without keys, or the wrong server key?"
            )

    async def _wait_until(self, predicate: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    await self._changed.wait()
        except TimeoutError as error:
            raise PeerTimeout(f"waited {timeout_s} s for {what}") from error

    def _heard(self, peer: Peer) -> None:
        if not peer.alive:
            logger.info("{} is back", peer.name)
        peer.last_seen, peer.alive = time.monotonic(), True

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        if self._allow_list is not None:
            self._allow_list.close()
        self._context.destroy(linger=0)


def _address(frame: zmq.Frame) -> str:
    """Where a message came from, as libzmq saw it."""
    try:
        return str(frame.get("Peer-Address")) or "an unknown address"
    except zmq.ZMQError:
        return "an unknown address"
