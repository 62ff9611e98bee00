"""`Doorway`: watches connections come and go, and names those that leave without having been greeted.

libzmq reports a failed handshake without an address, and some not at all (a frame above the limit, plain HTTP). It does
say which file descriptor it accepted and closed, so the address is looked up while the connection is open. A stranger
that is gone before that stays nameless: it is reported after a moment, unless it came again and was named.
"""

import asyncio
import os
import socket
import time
from collections import OrderedDict

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
                    event = parse_monitor_message(await monitor.recv_multipart())
            except TimeoutError:
                self._report_nameless()
            else:
                self.see(event["event"], event["value"])

    def see(self, event: int, value: int) -> None:
        """Take one event of the server's socket."""
        if event == zmq.EVENT_ACCEPTED:
            self._addresses[value] = _peer_address(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._left(self._addresses.pop(value, ""))
        elif event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the allow-list has named that one
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


def _peer_address(descriptor: int) -> str:
    """The address at the other end; empty if libzmq has closed the connection meanwhile."""
    try:
        ours = os.dup(descriptor)  # its number may stand for something else by now: a file, or nothing
    except OSError:
        return ""
    try:
        with socket.socket(fileno=ours) as connection:
            ours = -1  # the socket closes it
            return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""
    finally:
        if ours >= 0:
            os.close(ours)
