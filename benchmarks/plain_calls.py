"""The way of the pixels with nothing but system calls: what the kernel itself makes of it, for `benchmarks.multimodal`.

One process writes the samples to a file and syncs it, reads them back piece by piece and sends them; the other receives
them. Memory is used again and again. No format, no hash, no check, no second rank, no restart.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

COPIES = 4
"""Memory to page cache, that to memory, that to the socket, that to memory."""
NUM_TIMES = 6
_WAIT_S = 60.0
_WARM_PIECES = 16
_HEAD_BYTES = 1000
"""Before the pieces in the file, as a manifest would be. On some processors the kernel copies four times as slowly
between addresses with the same place in their pages, which pieces at the beginning of the file would hit."""


def store_and_send(
    path: Path, address: str | tuple[str, int], num_pieces: int, piece_bytes: int, pipe: Connection
) -> None:
    """Send everything `NUM_TIMES` times, as soon as it is told to; says its CPU seconds each time."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    memory = np.ones((_WARM_PIECES, piece_bytes), dtype=np.uint8)
    with socket.socket(family) as connection:
        connection.connect(address)
        for _ in range(NUM_TIMES):
            pipe.recv()
            started = time.process_time()
            _store(path, memory, num_pieces)
            with path.open("rb", buffering=0) as file:
                file.seek(_HEAD_BYTES)
                for number in range(num_pieces):
                    piece = memory[number % _WARM_PIECES].data
                    file.readinto(piece)
                    connection.sendall(piece)
            pipe.send(time.process_time() - started)
            path.unlink()


def _store(path: Path, memory: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", num_pieces: int) -> None:
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, _HEAD_BYTES + num_pieces * memory.shape[1])
        file.write(bytes(_HEAD_BYTES))
        for number in range(num_pieces):
            file.write(memory[number % _WARM_PIECES].data)
        os.fsync(file.fileno())


def ship(transport: str, num_pieces: int, piece_bytes: int) -> list[float]:
    """CPU seconds of both processes, each time that everything was stored, sent and received."""
    memory = np.ones((_WARM_PIECES, piece_bytes), dtype=np.uint8)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    seconds = []
    with tempfile.TemporaryDirectory() as directory, _listen(transport, directory) as listener:
        arguments = (Path(directory) / "pieces", listener.getsockname(), num_pieces, piece_bytes, theirs)
        process = context.Process(target=store_and_send, args=arguments, daemon=True)
        process.start()
        listener.settimeout(_WAIT_S)
        connection, _ = listener.accept()
        connection.settimeout(_WAIT_S)
        with connection:
            for _ in range(NUM_TIMES):
                ours.send("go")
                started = time.process_time()
                for number in range(num_pieces):
                    _receive(connection, memory[number % _WARM_PIECES].data)
                own_s = time.process_time() - started
                seconds.append(own_s + float(ours.recv()))
        process.join()
    return seconds


def _listen(transport: str, directory: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET if transport == "tcp" else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if transport == "tcp" else f"{directory}/link")
    listener.listen()
    return listener


def _receive(connection: socket.socket, piece: memoryview) -> None:
    while len(piece) > 0:
        num_bytes = connection.recv_into(piece)
        if num_bytes == 0:
            raise SystemExit("the sender ended early")
        piece = piece[num_bytes:]
