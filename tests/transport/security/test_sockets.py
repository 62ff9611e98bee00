"""What the sockets of `transport` must never leave to chance."""

import zmq
import zmq.asyncio

from transport.security.sockets import dealer, router
from transport.wire.messages import Limits

LIMITS = Limits(max_request_bytes=1000, max_frame_bytes=2000, queue_messages=7)


def test_server_socket_has_every_limit_set() -> None:
    with zmq.asyncio.Context() as context, router(context, None, LIMITS, 4.0) as socket:
        assert 1000 <= socket.getsockopt(zmq.MAXMSGSIZE) < 1000 + 4096
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 7
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 4000
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == 4
        assert socket.getsockopt(zmq.LINGER) == 0


def test_client_socket_has_every_limit_set() -> None:
    with zmq.Context() as context, dealer(context, None, LIMITS, 4.0) as socket:
        assert 2000 <= socket.getsockopt(zmq.MAXMSGSIZE) < 2000 + 4096
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 7
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 1000
        assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == socket.getsockopt(zmq.HEARTBEAT_TTL) == 4000
        assert socket.getsockopt(zmq.IMMEDIATE) == 1
        assert socket.getsockopt(zmq.LINGER) == 0
