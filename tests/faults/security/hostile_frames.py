"""Hostile messages against a live batch server, while an honest trainer fetches from it.

One attacker reads its answers, the other lets them pile up; both come back on new connections. Any crash, change of the
outbox, damaged sample or growth above the limit is an error.
"""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq

from tests.faults.conftest import Figures
from tests.faults.security.attacked_server import NUM_SAMPLES, RUN, first_batch
from tests.faults.security.hostile_messages import hostile_messages
from transport.client.client import BatchClient
from transport.errors import TransportError
from transport.outbox.outbox import Outbox
from transport.wire.codec import encode
from transport.wire.messages import Ping

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
