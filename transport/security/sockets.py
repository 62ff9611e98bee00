"""ROUTER and DEALER sockets with every limit set, never libzmq's defaults (unlimited, off, silent discard)."""

import zmq
import zmq.asyncio

from transport.security.keys import CurveKeys
from transport.wire.messages import Limits

_CURVE_OVERHEAD_BYTES = 1024
"""What encryption adds to a frame, generously; MAXMSGSIZE counts encrypted bytes."""

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def router(
    context: zmq.asyncio.Context, keys: CurveKeys | None, limits: Limits, peer_timeout_s: float
) -> zmq.asyncio.Socket:
    """The server's socket, not bound yet. Sending to a peer that is gone raises instead of vanishing.

    It sends no ZMTP heartbeats of its own: libzmq 4.3.5 aborts the process when one is due on a connection that a
    flooding peer has left (zeromq/libzmq#4364). A client's heartbeats carry a time to live, after which libzmq drops a
    silent one here all the same; TCP keep-alive does it for peers that send none.
    """
    socket = context.socket(zmq.ROUTER, socket_class=zmq.asyncio.Socket)
    _limit(socket, limits.max_request_bytes, limits, peer_timeout_s)
    _keep_alive(socket, peer_timeout_s)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        _identify(socket, keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"tandem")
    return socket


def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys | None, limits: Limits, peer_timeout_s: float
) -> "zmq.Socket[bytes]":
    """A client's socket, not connected yet. Nothing is queued for a server that is not there."""
    socket = context.socket(zmq.DEALER)
    _limit(socket, limits.max_frame_bytes, limits, peer_timeout_s)
    _send_heartbeats(socket, peer_timeout_s)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if keys is not None:
        _identify(socket, keys)
        (server,) = keys.peers
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    return socket


def allow_ipv6(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str) -> None:
    """Before binding or connecting. Not for names: libzmq would prefer their IPv6 address to the one that is bound."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def _limit(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", max_bytes: int, limits: Limits, timeout_s: float) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + _CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.SNDHWM, limits.queue_messages)
    socket.setsockopt(zmq.RCVHWM, limits.queue_messages)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(timeout_s))


def _send_heartbeats(socket: "zmq.Socket[bytes]", timeout_s: float) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ms(timeout_s) // 4)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ms(timeout_s))
    socket.setsockopt(zmq.HEARTBEAT_TTL, _ms(timeout_s))


def _keep_alive(socket: zmq.asyncio.Socket, timeout_s: float) -> None:
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, round(timeout_s)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, round(timeout_s / 4)))
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _ms(seconds: float) -> int:
    return max(100, round(seconds * 1000))


def _identify(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", keys: CurveKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
