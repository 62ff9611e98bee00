"""A server socket that nobody reads while peers flood it and leave: `python -m tests.faults.security.unread_router`.

Ends with exit code 0 if libzmq survives it. A process of its own, because what must not happen is an abort.
"""

import asyncio
import contextlib

import zmq
import zmq.asyncio

from transport.security.sockets import router
from transport.wire.messages import Limits

PEER_TIMEOUT_S = 0.8
NUM_PEERS = 10


def flood(port: int) -> None:
    """Fill the queue of one connection after the other, and hang up."""
    with zmq.Context() as context:
        for _ in range(NUM_PEERS):
            with context.socket(zmq.DEALER) as peer, contextlib.suppress(zmq.Again):
                peer.linger, peer.sndtimeo = 0, 200
                peer.connect(f"tcp://127.0.0.1:{port}")
                while True:
                    peer.send(bytes(1000))


async def main() -> None:
    """Be flooded, then wait until any timer of any connection has come."""
    with zmq.asyncio.Context() as context, router(context, None, Limits(), PEER_TIMEOUT_S) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        await asyncio.to_thread(flood, port)
        await asyncio.sleep(2.5 * PEER_TIMEOUT_S)


if __name__ == "__main__":
    asyncio.run(main())
