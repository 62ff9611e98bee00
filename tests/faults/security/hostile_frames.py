"""Hostile messages against a live batch server, while an honest trainer fetches from it.

One attacker reads its answers, the other lets them pile up; both come back on new connections. Any crash, change of the
outbox, damaged sample or growth above the limit is an error.

What an attacker sends to a batch server: an endless, reproducible mix of messages, wrong in every way we know.

    for frames in hostile_messages(seed=1): socket.send_multipart(frames)

The attacker does not know the run's id: nothing here can pass for a trainer of the run.
"""

import itertools
import json
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import zmq

from tests.faults.conftest import Figures
from tests.faults.security.attacked_server import NUM_SAMPLES, RUN, first_batch
from transport.client.client import BatchClient
from transport.errors import TransportError
from transport.outbox.outbox import Outbox
from transport.wire.codec import encode, int32
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Bye,
    Committed,
    GetBroadcast,
    GetManifest,
    GetSamples,
    GetWeightBytes,
    GetWeights,
    Hello,
    Ping,
    Trained,
    WeightsPublished,
)
from transport.wire.sample import EncodedTensor

FRAMES_PER_CONNECTION = 5_000

WARM_UP_SHARE = 0.1
"""Of all messages, those sent before memory is measured: caches and queues are full by then."""

MAX_GROWTH_BYTES = 50 << 20

SYNC_S = 120.0


@dataclass
class HonestTrainer:
    """Fetches the whole batch again and again, and checks every byte."""

    endpoint: str
    error: Exception | None = None
    num_fetches: int = 0
    longest_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until stopped, or until something else than the right bytes comes."""
        try:
            self._fetch()
        except (TransportError, AssertionError) as error:
            self.error = error

    def _fetch(self) -> None:
        batch = first_batch()
        expected = list(batch.frames)
        with BatchClient(self.endpoint, RUN, connect_timeout_s=30, lost_timeout_s=60) as client:
            client.hello()
            while not self.stop.is_set():
                started = time.monotonic()
                samples = client.samples(batch.manifest, range(NUM_SAMPLES))
                assert [encode(sample) for sample in samples] == expected
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                self.num_fetches += 1


class Attacker:
    """One connection at a time to `endpoint`; `reads` its answers or leaves them to pile up."""

    def __init__(self, endpoint: str, *, reads: bool) -> None:
        self._endpoint = endpoint
        self._reads = reads
        self._context = zmq.Context()
        self._socket = self._connect()

    def send(self, frames: list[bytes]) -> None:
        """Send, reading whatever came back."""
        self._socket.send_multipart(frames)
        while self._reads and self._socket.poll(0):
            self._socket.recv_multipart()

    def reconnect(self) -> None:
        """Leave once everything was read by the server, and come back."""
        self.sync()
        self._socket.close(linger=0)
        self._socket = self._connect()

    def sync(self) -> None:
        """Return once the server has dealt with everything sent so far. `TimeoutError` if it never does."""
        seq = time.monotonic_ns()
        self._socket.send(encode(Ping(seq=seq)))
        deadline = time.monotonic() + SYNC_S
        needle = encode(Ping(seq=seq))[-9:]
        while time.monotonic() < deadline:
            if self._socket.poll(100) and needle in self._socket.recv_multipart()[0]:
                return
            if not self._reads:  # its queue was full: the answer to the first question may have been dropped
                self._socket.send(encode(Ping(seq=seq)))
        raise TimeoutError(f"{self._endpoint} did not answer within {SYNC_S} s")

    def close(self) -> None:
        """Free the socket."""
        self._context.destroy(linger=0)

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndtimeo = int(SYNC_S * 1000)
        socket.connect(self._endpoint)
        return socket


@dataclass
class Victim:
    """The server under attack."""

    endpoint: str
    process: psutil.Process
    rejections: dict[str, int] = field(default_factory=dict)
    """What it said last."""

    def listen(self, reports: Iterable[bytes]) -> None:
        """Read its reports to the end."""
        for line in reports:
            self.rejections = json.loads(line)


@contextmanager
def attacked_server(folder: Path) -> Iterator[Victim]:
    """A server that must live until the block ends."""
    with (folder / "server.log").open("wb") as log:
        command = [sys.executable, "-m", f"{__package__}.attacked_server", str(folder / "outbox")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert server.stdout is not None
    try:
        victim = Victim(server.stdout.readline().decode().strip(), psutil.Process(server.pid))
        reader = threading.Thread(target=victim.listen, args=(server.stdout,), daemon=True)
        reader.start()
        yield victim
        assert server.poll() is None, f"the server died:\n{(folder / 'server.log').read_text()[-3000:]}"
    finally:
        server.kill()
        server.wait(timeout=30)
        reader.join(timeout=30)
        server.stdout.close()


def attack(folder: Path, num_frames: int, seed: int = 0) -> Figures:
    """Send `num_frames` messages and measure. Raises if the server was harmed."""
    with attacked_server(folder) as victim:
        honest = HonestTrainer(victim.endpoint)
        thread = threading.Thread(target=honest.run, daemon=True)
        thread.start()
        started = time.monotonic()
        warm_up = round(num_frames * WARM_UP_SHARE)
        messages = hostile_messages(seed)
        send_all(victim.endpoint, itertools.islice(messages, warm_up))
        before = victim.process.memory_info().rss
        send_all(victim.endpoint, itertools.islice(messages, num_frames - warm_up))
        seconds = time.monotonic() - started
        growth = victim.process.memory_info().rss - before
        honest.stop.set()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the honest trainer hangs"
    progress = Outbox(folder / "outbox", RUN).progress
    assert (progress.last_trained, progress.last_committed, progress.weights) == (0, 0, None), progress
    assert growth <= MAX_GROWTH_BYTES, f"memory grew by {growth >> 20} MB"
    assert honest.error is None, honest.error
    assert honest.num_fetches > 0, "the honest trainer got nothing"
    return {
        "frames": num_frames,
        "crashes": 0,
        "seconds": round(seconds, 1),
        "rss_growth_mb": round(growth / 2**20, 1),
        "rejected": dict(sorted(victim.rejections.items())),
        "log_lines": len((folder / "server.log").read_text().splitlines()),
        "honest_fetches": honest.num_fetches,
        "honest_longest_fetch_s": round(honest.longest_s, 3),
    }


def send_all(endpoint: str, messages: Iterator[list[bytes]]) -> None:
    """Send `messages` from two attackers in turn; return once the server has dealt with all."""
    attackers = (Attacker(endpoint, reads=True), Attacker(endpoint, reads=False))
    for number, frames in enumerate(messages, start=1):
        attackers[number % 2].send(frames)
        if number % FRAMES_PER_CONNECTION == 0:
            attackers[(number // FRAMES_PER_CONNECTION) % 2].reconnect()
    for attacker in attackers:
        attacker.sync()
        attacker.close()


Frames = list[bytes]

Random = random.Random

FOREIGN_RUN = "not-this-run"

MESSAGES = (
    Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=FOREIGN_RUN, rank=0, world_size=1, last_committed=0),
    Hello(seq=1, schema_version=SCHEMA_VERSION + 1, run_id=FOREIGN_RUN, rank=0, world_size=1, last_committed=0),
    GetManifest(seq=2, step=1),
    GetSamples(seq=3, step=1, indices=int32([0, 1, 2])),
    GetSamples(seq=3, step=1, indices=EncodedTensor("int64", (2**40, 7), memoryview(b"x" * 8))),
    Trained(seq=4, step=1),
    Committed(seq=5, step=1),
    WeightsPublished(seq=6, version=1, location="/dev/zero", digest="0"),
    GetWeights(seq=9, version=1),
    GetWeightBytes(seq=10, version=1, offset=2**62, num_bytes=2**62),
    GetBroadcast(seq=11, version=-1),
    Ping(seq=7),
    Bye(seq=8, reason="x" * 300),
)

ENCODED = tuple(encode(message) for message in MESSAGES)

KINDS = (
    "hello",
    "get_manifest",
    "get_samples",
    "trained",
    "committed",
    "weights_published",
    "get_weights",
    "get_weight_bytes",
    "get_broadcast",
    "ping",
    "bye",
    "welcome",
)

FIELDS = ("seq", "schema_version", "run_id", "rank", "world_size", "last_committed", "step", "indices", "version", "x")


def hostile_messages(seed: int) -> Iterator[Frames]:
    """Messages for ever; the same ones for the same seed."""
    draw = random.Random(seed)
    makers = tuple(maker for maker, share in MIX for _ in range(share))
    while True:
        yield draw.choice(makers)(draw)


def noise(draw: Random) -> Frames:
    """Bytes that mean nothing."""
    return [draw.randbytes(draw.randrange(200))]


def mutated(draw: Random) -> Frames:
    """A real message with some bytes changed, cut, repeated or inserted."""
    frame = bytearray(draw.choice(ENCODED))
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(frame)) if frame else 0
        match draw.randrange(5):
            case 0 if frame:
                frame[at] = draw.randrange(256)
            case 1:
                del frame[at:]
            case 2:
                frame[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3 if frame:
                frame[at] ^= 1 << draw.randrange(8)
            case _:
                frame += frame[at : at + draw.randrange(1, 30)]
    return [bytes(frame)]


def mistyped(draw: Random) -> Frames:
    """Well-formed msgpack, with the tag of a message and fields of any type."""
    fields: dict[object, object] = {"kind": draw.choice(KINDS)}
    for name in draw.sample(FIELDS, draw.randrange(len(FIELDS))):
        fields[name] = anything(draw)
    return [msgspec.msgpack.encode(fields)]


def anything(draw: Random, depth: int = 0) -> object:
    """A value of any msgpack type."""
    match draw.randrange(9 if depth < 3 else 7):
        case 0:
            return None
        case 1:
            return draw.choice([0, 1, -1, 2**31, -(2**63), 2**64 - 1])
        case 2:
            return draw.choice([0.0, float("nan"), float("inf"), 1e308])
        case 3:
            return "\0\n\x1b" * draw.randrange(20)
        case 4:
            return draw.randbytes(draw.randrange(40))
        case 5:
            return draw.random() < 0.5
        case 6:
            return msgspec.msgpack.Ext(draw.randrange(-128, 128), draw.randbytes(4))
        case 7:
            return [anything(draw, depth + 1) for _ in range(draw.randrange(5))]
        case _:
            return {str(key): anything(draw, depth + 1) for key in range(draw.randrange(5))}


def nested(draw: Random) -> Frames:
    """Arrays or maps, thousands deep, alone or as a field."""
    opening = draw.choice([b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\1"])
    deep = opening * draw.choice([50, 1500, 20_000]) + b"\xc0"
    return [deep if draw.random() < 0.3 else b"\x82\xa4kind\xa4ping\xa1x" + deep]


def overpromised(draw: Random) -> Frames:
    """A string, array or map that claims to have up to four billion elements."""
    size = struct.pack(">I", draw.choice([2**32 - 1, 2**31, 2**24, 70_000]))
    head = draw.choice([b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"]) + size
    return [head + b"x" * draw.randrange(20) if draw.random() < 0.5 else b"\x82\xa4kind\xa4ping\xa3seq" + head]


def multipart(draw: Random) -> Frames:
    """A message in many parts where one is expected."""
    return [draw.choice((*ENCODED, b"")) for _ in range(draw.choice([2, 3, 10, 200]))]


def large(draw: Random) -> Frames:
    """Much, but below the limit."""
    kind = draw.choice((b"\x00", b"\xc1", b"\x91", b"a"))
    return [kind * draw.choice([10_000, 100_000])]


def unasked(draw: Random) -> Frames:
    """A perfect message of somebody who never said hello, or of another run or version."""
    return [draw.choice(ENCODED)]


MIX: tuple[tuple[Callable[[Random], Frames], int], ...] = (
    (noise, 10),
    (mutated, 40),
    (mistyped, 20),
    (nested, 3),
    (overpromised, 8),
    (multipart, 4),
    (large, 1),
    (unasked, 14),
)
