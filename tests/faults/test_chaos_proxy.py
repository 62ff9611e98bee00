"""The proxy itself: each fault does what it says to a real ZeroMQ pair."""

import time
from collections.abc import Iterator

import pytest
import zmq

from tests.faults.chaos_proxy import ChaosProxy, Faults

Pair = tuple[ChaosProxy, zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A DEALER that talks through the proxy to another DEALER."""
    context = zmq.Context()
    server = context.socket(zmq.DEALER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    with ChaosProxy(port) as proxy:
        client = context.socket(zmq.DEALER)
        client.connect(f"tcp://127.0.0.1:{proxy.port}")
        client.send(b"ping")
        assert server.poll(5000)
        server.recv()
        yield proxy, client, server
        client.close(linger=0)
    server.close(linger=0)
    context.term()


def reconnect(proxy: ChaosProxy, client: "zmq.Socket[bytes]", faults: Faults) -> None:
    proxy.faults = faults
    before = proxy.num_connections
    proxy.cut()
    deadline = time.monotonic() + 5
    while proxy.num_connections == before and time.monotonic() < deadline:
        client.poll(10)
    assert proxy.num_connections > before


def receive_all(server: "zmq.Socket[bytes]", timeout_ms: int = 500) -> list[list[bytes]]:
    messages = []
    while server.poll(timeout_ms):
        messages.append(server.recv_multipart())
    return messages


def test_duplicate_and_swap_keep_messages_whole(pair: Pair) -> None:
    proxy, client, server = pair
    reconnect(proxy, client, Faults(duplicate=0.5, swap=0.5))
    for number in range(50):
        client.send_multipart([b"%d" % number, b"body"])
    received = [int(message[0]) for message in receive_all(server) if len(message) == 2]
    assert set(received) == set(range(50))
    assert len(received) > 50
    assert received != sorted(received)
    assert proxy.num_faults["duplicate"] == len(received) - 50


def test_replay_brings_old_messages_again(pair: Pair) -> None:
    proxy, client, server = pair
    reconnect(proxy, client, Faults(replay=0.5))
    for number in range(50):
        client.send(b"%d" % number)
    received = [int(message[0]) for message in receive_all(server)]
    assert len(received) == 50 + proxy.num_faults["replay"] > 50
    new = list(dict.fromkeys(received))
    assert new == list(range(50)), "the messages themselves keep their order"


def test_trickle_slows_a_message_down(pair: Pair) -> None:
    proxy, client, server = pair
    proxy.faults = Faults(trickle_bytes_per_s=100)
    start = time.monotonic()
    client.send(b"x" * 50)
    assert server.poll(5000)
    assert time.monotonic() - start > 0.3
