"""`Router`: the server's socket and its guards. Garbage and foreign keys are counted and dropped."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
import zmq.asyncio
from loguru import logger
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from transport.errors import BindError, CodecError
from transport.security.keys import CurveKeys
from transport.security.sockets import allow_ipv6, router
from transport.wire.codec import decode_client_message, encode, foreign_greeting
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import ClientMessage, Limits, Refusal, ServerMessage
from transport.wire.sample import Buffer


class Reason(StrEnum):
    """Why something a peer sent was not served."""

    GARBAGE = "garbage"
    """Frames that are not a message of ours."""
    OVERSIZE = "oversize"
    """A frame above the limit."""
    SCHEMA = "schema"
    """A peer of another schema version."""
    RUN = "run"
    """A peer of another run, or one whose checkpoint does not fit this run."""
    KEY = "key"
    """A peer without a key on the allow-list."""
    HANDSHAKE = "handshake"
    """A connection that ended before its first message: no keys, the wrong server key, not one of ours, or a frame so
    large that libzmq cuts it off."""
    UNREACHABLE = "unreachable"
    """A reply to a peer that is gone or does not read."""
    BUSY = "busy"
    """A second request while the first is being served."""


class Rejections:
    """Counts by reason. Remembers the last `max_peers` (peer, reason) pairs, so that a flood is one line in the log."""

    def __init__(self, max_peers: int = 1024) -> None:
        self._counts: Counter[Reason] = Counter()
        self._logged: OrderedDict[tuple[str, Reason], None] = OrderedDict()
        self._max_peers = max_peers

    def add(self, reason: Reason, peer: str, detail: str) -> None:
        """Count one rejection; the first of its kind from `peer` is logged. `detail` may hold what the peer wrote."""
        self._counts[reason] += 1
        key = (peer, reason)
        if key in self._logged:
            self._logged.move_to_end(key)
            return
        self._logged[key] = None
        if len(self._logged) > self._max_peers:
            self._logged.popitem(last=False)
        text = one_line(detail)
        logger.warning("rejected {} from {}: {} (more of this kind is only counted)", reason.value, peer, text)

    def counts(self) -> dict[str, int]:
        """Rejections so far, by reason."""
        return {reason.value: count for reason, count in self._counts.items()}


def one_line(text: str, max_chars: int = 300) -> str:
    """What a peer wrote, fit for one line of a log: short, and without line breaks or control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:max_chars])


_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks (RFC 27)
_ZAP_VERSION = b"1.0"


class AllowList:
    """Answers libzmq's question "may this key connect?" for each CURVE handshake of `context`, its owner."""

    def __init__(self, context: zmq.asyncio.Context, keys: CurveKeys, rejections: Rejections) -> None:
        self._keys = keys
        self._rejections = rejections
        self._socket = context.socket(zmq.REP, socket_class=zmq.asyncio.Socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            request = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._decide(request))

    def _decide(self, request: list[bytes]) -> list[bytes]:
        request_id, address = request[1], request[3].decode("ascii", "replace")
        mechanism, credentials = request[5], request[6:]
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._keys.peers:
            return [_ZAP_VERSION, request_id, b"200", b"OK", key, b""]
        name = key.decode("ascii")[:8] or mechanism.decode("ascii", "replace")
        self._rejections.add(Reason.KEY, address, f"client key {name}... is not on the allow-list (client*.public)")
        return [_ZAP_VERSION, request_id, b"400", b"key is not on the allow-list", b"", b""]


_UNKNOWN_ADDRESS = "an unknown address"
_SAID_NOTHING = "a connection ended before its first message: no keys, not one of ours, or a frame above the limit"
_COPY_BYTES = 64 * 1024
"""Mean size of a frame below which frames are copied into the socket's queue."""
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message, the connection it came by and the address of its sender."""

    identity: bytes
    address: str
    message: ClientMessage


class Router:
    """Owns the ROUTER socket, its context, its monitor and its allow-list, and closes them."""

    def __init__(self, keys: CurveKeys | None, limits: Limits, peer_timeout_s: float) -> None:
        self.rejections = Rejections()
        self._limits = limits
        self._context = zmq.asyncio.Context()
        self._allow_list = AllowList(self._context, keys, self.rejections) if keys is not None else None
        self._socket = router(self._context, keys, limits, peer_timeout_s)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor)
        self._spoke: set[int] = set()
        """Descriptors of connections by which a message came, whatever it was."""
        self._num_refused = 0
        """Open connections that the allow-list has refused, and counted."""

    def bind(self, endpoint: str) -> str:
        """Bind and return the address really bound (port 0 means any). `BindError` if it is taken."""
        wildcard = endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint
        allow_ipv6(self._socket, endpoint)
        try:
            self._socket.bind(wildcard)
        except zmq.ZMQError as error:
            self.close()
            raise BindError(f"cannot bind {endpoint}: {error.strerror}") from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def start_guards(self, tasks: asyncio.TaskGroup) -> None:
        """Run the tasks that watch over handshakes. Without them, a server with keys accepts no client."""
        tasks.create_task(self._watch_connections())
        if self._allow_list is not None:
            tasks.create_task(self._allow_list.serve())

    async def receive(self) -> Incoming | None:
        """The next message, or None if what came was not one."""
        frames = await self._socket.recv_multipart(copy=False)
        identity, (descriptor, address) = frames[0].bytes, _source(frames[0])
        self._count_silent()
        self._spoke.add(descriptor)
        if len(frames) != 2:
            self.rejections.add(Reason.GARBAGE, address, f"a message of {len(frames)} frames")
            return None
        head = frames[1].buffer
        if head.nbytes > self._limits.max_request_bytes:
            self.rejections.add(Reason.OVERSIZE, address, f"a request of {head.nbytes} bytes")
            return None
        try:
            message = decode_client_message(head)
        except CodecError as error:
            await self._refuse(identity, address, head, error)
            return None
        return Incoming(identity, address, message)

    async def send(
        self, identity: bytes, address: str, message: ServerMessage, frames: Sequence[Buffer] | None = None
    ) -> bool:
        """Send or drop, at once. False if the connection is gone: its peer asks again when it is back."""
        parts = [identity, encode(message), *(frames or ())]
        # Sharing a buffer with libzmq costs more than copying one, unless it is large: a batch has thousands of frames.
        copy = sum(map(len, parts)) < _COPY_BYTES * len(parts)
        try:
            await self._socket.send_multipart(parts, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            self.rejections.add(Reason.UNREACHABLE, address, "its queue is full: it asks and does not read")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.rejections.add(Reason.UNREACHABLE, address, "the connection is gone")
            return False
        return True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    async def _watch_connections(self) -> None:
        while True:
            await self._monitor.poll()
            self._count_silent()

    def _count_silent(self) -> None:
        """Count connections that ended without a message. libzmq says neither whose they were nor why they ended.

        It knows a connection by its descriptor, which the next connection may get. So what happened to connections is
        looked at before a message is: its connection was accepted before. One that leaves before its message is looked
        at counts as silent.
        """
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._num_refused += 1
            elif event["event"] == zmq.EVENT_ACCEPTED:
                self._spoke.discard(descriptor)
            elif descriptor in self._spoke:
                self._spoke.remove(descriptor)
            elif self._num_refused:
                self._num_refused -= 1
            else:
                self.rejections.add(Reason.HANDSHAKE, _UNKNOWN_ADDRESS, _SAID_NOTHING)

    async def _refuse(self, identity: bytes, address: str, head: memoryview, error: CodecError) -> None:
        greeting = foreign_greeting(head)
        if greeting is None:
            self.rejections.add(Reason.GARBAGE, address, str(error))
            return
        seq, version = greeting
        reason = f"schema version {version}, this server speaks {SCHEMA_VERSION}"
        self.rejections.add(Reason.SCHEMA, address, reason)
        await self.send(identity, address, Refusal(seq=seq, schema_version=SCHEMA_VERSION, reason=reason))


def _source(frame: zmq.Frame) -> tuple[int, str]:
    """Descriptor and address of the connection that a message came by. libzmq does not tell those of plain HTTP."""
    try:
        return int(frame.get(zmq.SRCFD)), str(frame.get("Peer-Address")) or _UNKNOWN_ADDRESS
    except zmq.ZMQError:
        return -1, _UNKNOWN_ADDRESS
