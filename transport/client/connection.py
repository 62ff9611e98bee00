"""`Connection`: one DEALER socket of a client, from connect to close. When it fails, it is thrown away.

A socket monitor tells at once when the server goes or refuses our keys; silence is noticed by the deadlines.
"""

import math
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.errors import CodecError, LinkDown, Refused, SchemaMismatch
from transport.security.keys import CurveKeys
from transport.security.sockets import HANDSHAKE_FAILURES, allow_ipv6, dealer
from transport.wire.codec import decode_server_message, foreign_greeting
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import Limits, ServerMessage

_MECHANISM_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

Received = tuple[ServerMessage, list[memoryview]]


class Connection:
    """Every method raises `LinkDown` once the connection has failed. Deadlines are in monotonic seconds."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        keys: CurveKeys | None,
        limits: Limits,
        peer_timeout_s: float,
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        self._socket = dealer(context, keys, limits, peer_timeout_s)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        allow_ipv6(self._socket, endpoint)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise LinkDown(f"cannot connect to {endpoint}: {error.strerror}") from error

    def send(self, data: bytes, deadline: float) -> bool:
        """Hand `data` to the server; False if there was no connection by then."""
        while not (is_sent := self.try_send(data)) and time.monotonic() < deadline:
            self._wait(zmq.POLLOUT, deadline)
        return is_sent

    def try_send(self, data: bytes) -> bool:
        """Send if that is possible at once."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, deadline: float) -> Received | None:
        """The next message of the server, `None` if none came by then. `SchemaMismatch` if it is of another version."""
        while (received := self.try_receive()) is None and time.monotonic() < deadline:
            self._wait(zmq.POLLIN, deadline)
        return received

    def try_receive(self) -> Received | None:
        """The next message if it has arrived, else `None`."""
        try:
            head, *frames = (frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return None
        try:
            return decode_server_message(head), frames
        except CodecError as error:
            greeting = foreign_greeting(head)
            if greeting is not None:
                raise SchemaMismatch(SCHEMA_VERSION, greeting[1]) from error
            raise LinkDown(f"{self.endpoint} sent what is not a message of ours: {error}") from error

    def close(self) -> None:
        """Drop the socket and whatever it still holds."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _wait(self, direction: int, deadline: float) -> None:
        """Sleep until the socket is ready in `direction`, or the deadline."""
        remaining_ms = math.ceil((deadline - time.monotonic()) * 1000)
        self._poller.register(self._socket, direction)
        ready = dict(self._poller.poll(max(0, remaining_ms)))
        if self._monitor in ready and self._socket not in ready:
            event = recv_monitor_message(self._monitor)
            self._explain(event["event"], event["value"])

    def _explain(self, kind: int, value: int) -> None:
        """Turn a monitor event into the error it means."""
        if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            key = self._keys.file if self._keys is not None else "(none)"
            raise Refused(f"{self.endpoint} refused our key {key}: it is not on the server's allow-list")
        if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            ours, theirs = ("no keys", "some") if self._keys is None else (str(self._keys.file), "none")
            raise Refused(f"{self.endpoint} and this client do not agree on security: we have {ours}, it has {theirs}")
        if kind == zmq.EVENT_DISCONNECTED:
            raise LinkDown(f"{self.endpoint} closed the connection")
        raise LinkDown(
            f"{self.endpoint} broke off while greeting: only one side has keys, server.public is another server's, "
            "or it is not a batch server"
        )
