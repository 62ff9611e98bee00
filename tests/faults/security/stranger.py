"""Somebody who should not be served, as a process of its own: `python -m tests.faults.security.stranger ...`.

Tries again and again until it is killed, and writes a line per try to OUT: `got ...` if it was served, else the error.
"""

import argparse
import random
import time
from pathlib import Path

import zmq

import transport.wire.manifest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", default="toy")
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--key-name", default="client")
    parser.add_argument("--schema", type=int)
    parser.add_argument("--garbage", action="store_true")
    arguments = parser.parse_args()
    if arguments.schema is not None:  # before anything that copies the constant is imported
        transport.wire.manifest.SCHEMA_VERSION = arguments.schema
    attempt = send_garbage if arguments.garbage else ask_for_batches
    while True:
        line = attempt(arguments)
        with arguments.out.open("a") as out:
            out.write(" ".join(line.split()) + "\n")
        time.sleep(0.1)


def ask_for_batches(arguments: argparse.Namespace) -> str:
    """Behave like a trainer."""
    from transport.client.client import BatchClient
    from transport.errors import TransportError
    from transport.security.keys import CurveKeys

    keys = None if arguments.keys is None else CurveKeys.for_client(arguments.keys, arguments.key_name)
    client = BatchClient(arguments.endpoint, arguments.run, keys=keys, connect_timeout_s=1.5, peer_timeout_s=1.0)
    try:
        with client:
            client.hello()
            return f"got {client.manifest(1)}"
    except TransportError as error:
        return f"{type(error).__name__}: {error}"


def send_garbage(arguments: argparse.Namespace) -> str:
    """Say a thousand things that mean nothing, with the right key if there is one."""
    from transport.errors import CodecError
    from transport.security.keys import CurveKeys
    from transport.security.sockets import dealer
    from transport.wire.codec import decode_server_message
    from transport.wire.messages import Limits

    keys = None if arguments.keys is None else CurveKeys.for_client(arguments.keys, arguments.key_name)
    noise = random.Random(time.monotonic_ns())
    with zmq.Context() as context, dealer(context, keys, Limits(), 1.0) as socket:
        socket.connect(arguments.endpoint)
        socket.sndtimeo = 2000
        for _ in range(1000):
            socket.send_multipart([noise.randbytes(50) for _ in range(noise.randrange(1, 4))])
        if not socket.poll(200):
            return "nothing"
        try:
            return f"got {decode_server_message(socket.recv_multipart()[0])}"
        except CodecError as error:
            return f"CodecError: {error}"


if __name__ == "__main__":
    main()
