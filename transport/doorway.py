"""`Doorway`: watches connections come and go, and names those that leave without having been greeted.

libzmq reports a failed handshake without an address, and some not at all (a frame above the limit, plain HTTP). It does
say which file descriptor it accepted and closed, so the address is looked up while the connection is open. A stranger
that is gone before that stays nameless: it is reported after a moment, unless it came again and was named. So does one
whose descriptor was given to the next connection meanwhile: the address that is found is that one's.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from transport.rejections import Reason, Rejections
from transport.sockets import HANDSHAKE_FAILURES

_EVENTS = HANDSHAKE_FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_BROKE_OFF = "it broke off while greeting: no keys, the wrong server.public, or not one of ours"
_LEFT = "it left without a word that we understand: not one of ours, or a frame above the limit"
_NAMELESS = "an address that was gone before it could be looked up"
_HOLD_BACK_S = 1.0
"""Seconds that a nameless stranger has to come again before it is reported."""
_MAX_FAMILIAR = 4096
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group of unix(7)."""
_MAX_EVENTS = 256
"""Events that are read before any is acted upon."""


class Sight(NamedTuple):
    """An event of the server's socket; `address` is who was behind the descriptor `value` when we looked."""

    event: int
    value: int
    address: str = ""


def without_mistaken(sights: Sequence[Sight]) -> list[Sight]:
    """`sights` in their order, without addresses of descriptors that a later connection among them had by then."""
    kept: list[Sight] = []
    later: set[int] = set()
    for sight in reversed(sights):
        is_mistaken = sight.event == zmq.EVENT_ACCEPTED and sight.value in later
        kept.append(sight._replace(address="") if is_mistaken else sight)
        if sight.event == zmq.EVENT_ACCEPTED:
            later.add(sight.value)
    return kept[::-1]


class Doorway:
    """Reports strangers of `server` to `rejections`. `know(address)` once a sound message came from there."""

    def __init__(self, server: zmq.asyncio.Socket, rejections: Rejections) -> None:
        self._server = server
        self._rejections = rejections
        self._addresses: dict[int, str] = {}
        """Open connections by file descriptor; empty for one that was closed before we looked."""
        self._familiar: OrderedDict[str, None] = OrderedDict()
        self._has_failed = False
        """A handshake failed; libzmq closes its connection with the very next event."""
        self._nameless_since: float | None = None

    def know(self, address: str) -> None:
        """One of ours speaks from `address`: a connection from there may end without a report."""
        self._familiar[address] = None
        self._familiar.move_to_end(address)
        if len(self._familiar) > _MAX_FAMILIAR:
            self._familiar.popitem(last=False)

    async def watch(self) -> None:
        """Look until cancelled."""
        monitor = self._server.get_monitor_socket(_EVENTS)
        while True:
            try:
                async with asyncio.timeout(_HOLD_BACK_S if self._nameless_since is not None else None):
                    sights = [_look(await monitor.recv_multipart())]
            except TimeoutError:
                self._report_nameless()
                continue
            with contextlib.suppress(zmq.Again):
                while len(sights) < _MAX_EVENTS:
                    sights.append(_look(await monitor.recv_multipart(zmq.NOBLOCK)))
            for sight in without_mistaken(sights):
                self.see(sight)

    def see(self, sight: Sight) -> None:
        """Take one event of the server's socket."""
        if sight.event == zmq.EVENT_ACCEPTED:
            self._addresses[sight.value] = sight.address
        elif sight.event == zmq.EVENT_DISCONNECTED:
            self._left(self._addresses.pop(sight.value, ""))
        elif sight.event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the allow-list has named that one
            self._has_failed = True

    def _left(self, address: str) -> None:
        failed, self._has_failed = self._has_failed, False
        if address in self._familiar and not failed:
            return
        if not address:
            self._nameless_since = self._nameless_since or time.monotonic()
        if not address or self._rejections.has_named(address):
            self._rejections.count(Reason.HANDSHAKE)
            return
        self._rejections.add(Reason.HANDSHAKE, address, _BROKE_OFF if failed else _LEFT)
        self._nameless_since = None

    def _report_nameless(self) -> None:
        since, self._nameless_since = self._nameless_since, None
        if since is not None and self._rejections.last_line < since - _HOLD_BACK_S:
            self._rejections.add(Reason.HANDSHAKE, _NAMELESS, _BROKE_OFF)


def _look(message: list[bytes]) -> Sight:
    event = parse_monitor_message(message)
    kind, value = event["event"], event["value"]
    return Sight(kind, value, peer_address(value) if kind == zmq.EVENT_ACCEPTED else "")


def _spelled(connection: socket.socket) -> str:
    """The peer as libzmq spells it in the messages it brings: over a Unix socket that is a process."""
    if connection.family != socket.AF_UNIX:
        return str(connection.getpeername()[0])
    pid, user, group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return f"localhost:{user}:{group}:{pid}"


def peer_address(descriptor: int) -> str:
    """The address at the other end; empty if libzmq has closed the connection meanwhile."""
    try:
        ours = os.dup(descriptor)  # its number may stand for something else by now: a file, or nothing
    except OSError:
        return ""
    try:
        with socket.socket(fileno=ours) as connection:
            ours = -1  # the socket closes it
            return _spelled(connection)
    except (OSError, IndexError):
        return ""
    finally:
        if ours >= 0:
            os.close(ours)
