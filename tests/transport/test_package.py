"""What `transport` may need, and what its sockets must never leave to chance."""

import subprocess
import sys

import zmq
import zmq.asyncio

from transport.limits import Limits
from transport.sockets import dealer, router

LIMITS = Limits(max_request_bytes=1000, max_frame_bytes=2000, queue_messages=7)


def test_transport_loads_neither_torch_nor_our_other_packages() -> None:
    code = (
        "import pkgutil, importlib, sys, transport\n"
        "for module in pkgutil.iter_modules(transport.__path__):\n"
        "    if module.name != '__main__': importlib.import_module(f'transport.{module.name}')\n"
        "banned = {'torch', 'transformers', 'orchestrator', 'trainer', 'inference', 'runtime', 'verifiers'}\n"
        "print(sorted(banned & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


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
