"""`fetch_weights`: an engine's side of the `zmq` channel. A whole, checked version in memory, or an error.

    offer from the first rank ─▶ checked ─▶ every rank's bytes, chunk by chunk, ranks side by side ─▶ every hash checked

One chunk per rank is in flight at a time, so that neither side queues more. A chunk that arrives damaged is asked for
again, a connection that breaks is made again; a rank that is gone for `lost_timeout_s`, a transfer that takes longer
than `timeout_s`, and a caller that lost interest end it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from transport.client.link import Link
from transport.errors import PeerTimeout, RequestFailed, WeightsError
from transport.security.keys import CurveKeys
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Broadcast,
    ClientMessage,
    Failure,
    GetBroadcast,
    GetWeightBytes,
    GetWeights,
    Hello,
    Limits,
    WeightBytes,
    Weights,
)
from transport.wire.weights import BroadcastGroup, WeightManifest, WeightOffer, check_offer, hash_bytes

Bytes = npt.NDArray[np.uint8]

_MAX_TRIES = 3
"""Tries for a chunk whose bytes do not have the promised hash."""
_MAX_THREADS = 8
"""Ranks that are fetched from side by side."""


JoinGroup = Callable[[BroadcastGroup, int, float], Iterator[Bytes]]
"""Join a group and yield that many bytes as they come; each step may take the given seconds. Raises `WeightsError`."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How to fetch. Times in seconds, sizes in bytes."""

    keys: CurveKeys | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    lost_timeout_s: float = 10.0
    peer_timeout_s: float = 3.0
    chunk_bytes: int = 8 << 20
    max_bytes: int = 1 << 40
    join: "JoinGroup | None" = None
    """Given: the bytes are broadcast in a group that this joins, instead of coming chunk by chunk over ZeroMQ."""


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """Every tensor's raw bytes, hashes checked."""

    manifest: WeightManifest
    data: dict[str, Bytes]


def fetch_weights(
    endpoint: str, run_id: str, version: int, settings: FetchSettings, given_up: threading.Event
) -> FetchedWeights:
    """All of `version` from the weight server at `endpoint` and those it names. Raises `TransportError`.

    Setting `given_up` ends it soon, with `WeightsError`.
    """
    rules = _Rules(run_id, settings, time.monotonic() + settings.timeout_s, given_up)
    with ExitStack() as stack:
        first = stack.enter_context(_Rank(endpoint, rules))
        offer = first.offer(version)
        check_offer(offer, endpoint, version=version, run_id=run_id, max_bytes=settings.max_bytes)
        data = {entry.name: np.empty(entry.num_bytes, np.uint8) for entry in offer.manifest.tensors}
        ranks = [first if server == endpoint else stack.enter_context(_Rank(server, rules)) for server in offer.servers]
        _fetch_all(ranks, offer, data, rules)
    for entry in offer.manifest.tensors:
        if hash_bytes(data[entry.name].data) != entry.hash:
            raise WeightsError(f"{entry.name} is corrupt: its hash differs from the manifest's")
    return FetchedWeights(offer.manifest, data)


@dataclass(frozen=True, slots=True)
class _Rules:
    run_id: str
    settings: FetchSettings
    deadline: float
    given_up: threading.Event

    @property
    def remaining_s(self) -> float:
        """Seconds until the transfer must be done; never 0, which some calls take for no deadline."""
        return max(0.1, self.deadline - time.monotonic())

    def check(self, news: str = "") -> None:
        """Raise `WeightsError` when it is time to stop."""
        if self.given_up.is_set():
            raise WeightsError("the transfer was given up: its caller does not wait any more")
        if time.monotonic() > self.deadline:
            late = f" ({news})" if news else ""
            raise PeerTimeout(f"the transfer took longer than {self.settings.timeout_s:g} s{late}")


class _Rank:
    def __init__(self, endpoint: str, rules: _Rules) -> None:
        self._rules = rules
        self.endpoint = endpoint
        self._link = Link(
            endpoint,
            lambda seq: Hello(
                seq=seq, schema_version=SCHEMA_VERSION, run_id=rules.run_id, rank=0, world_size=1, last_committed=0
            ),
            keys=rules.settings.keys,
            limits=Limits(),
            peer_timeout_s=rules.settings.peer_timeout_s,
            heartbeat_s=min(1.0, rules.settings.peer_timeout_s / 3),
            on_wait=rules.check,
            on_link=lambda problem: None,
        )

    def __enter__(self) -> "_Rank":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._link.close("done" if error is None else "gave up")

    def offer(self, version: int) -> WeightOffer:
        reply, _ = self._ask(lambda seq: GetWeights(seq=seq, version=version))
        if not isinstance(reply, Weights):
            raise WeightsError(f"{self.endpoint} answered GetWeights with {type(reply).__name__}")
        return reply.offer

    def read(self, version: int, offset: int, num_bytes: int) -> Bytes:
        def request(seq: int) -> GetWeightBytes:
            return GetWeightBytes(seq=seq, version=version, offset=offset, num_bytes=num_bytes)

        for _ in range(_MAX_TRIES):
            reply, frames = self._ask(request)
            if not isinstance(reply, WeightBytes) or [frame.nbytes for frame in frames] != [num_bytes]:
                raise WeightsError(f"{self.endpoint} sent something else than {num_bytes} bytes from {offset} on")
            if xxhash.xxh3_64_intdigest(frames[0]) == reply.hash:
                return np.frombuffer(frames[0], np.uint8)
        raise WeightsError(f"bytes from {offset} on arrived damaged from {self.endpoint} {_MAX_TRIES} times")

    def broadcast(self, version: int) -> BroadcastGroup:
        reply, _ = self._ask(lambda seq: GetBroadcast(seq=seq, version=version))
        if not isinstance(reply, Broadcast):
            raise WeightsError(f"{self.endpoint} answered GetBroadcast with {type(reply).__name__}")
        if not (reply.group.timeout_s > 0 and reply.group.chunk_bytes > 0):
            raise WeightsError(f"{self.endpoint} opened a group that cannot be joined: {reply.group}")
        return reply.group

    def _ask(self, make: Callable[[int], ClientMessage]) -> "tuple[object, list[memoryview]]":
        self._rules.check()
        reply, frames = self._link.ask(make, min(self._rules.settings.lost_timeout_s, self._rules.remaining_s))
        if isinstance(reply, Failure):
            raise RequestFailed(reply.reason)
        return reply, frames


def _fetch_all(ranks: Sequence[_Rank], offer: WeightOffer, data: dict[str, Bytes], rules: _Rules) -> None:
    """Ranks side by side; the first error ends them all."""
    with ThreadPoolExecutor(min(len(ranks), _MAX_THREADS), thread_name_prefix="fetch weights") as pool:
        futures = [pool.submit(_fetch_from, rank, number, offer, data, rules) for number, rank in enumerate(ranks)]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is not None and pending:
            rules.given_up.set()
    if failed is not None:
        failed.result()


def _fetch_from(rank: _Rank, number: int, offer: WeightOffer, data: dict[str, Bytes], rules: _Rules) -> None:
    targets = [
        data[piece.name][piece.offset : piece.offset + piece.num_bytes]
        for piece in offer.ranges
        if piece.server == number
    ]
    scatter = Scatter(targets)
    for chunk in _chunks(rank, offer.manifest.version, sum(target.nbytes for target in targets), rules):
        rules.check()
        scatter.take(chunk)


def _chunks(rank: _Rank, version: int, num_bytes: int, rules: _Rules) -> Iterator[Bytes]:
    """The chunks of a rank's ranges, in order."""
    settings = rules.settings
    if num_bytes and settings.join is not None:
        group = rank.broadcast(version)
        yield from settings.join(group, num_bytes, min(group.timeout_s, rules.remaining_s))
        return
    for start in range(0, num_bytes, settings.chunk_bytes):
        yield rank.read(version, start, min(settings.chunk_bytes, num_bytes - start))


class Scatter:
    """Fills `targets`, one after the other, with the bytes that it is given."""

    def __init__(self, targets: Sequence[Bytes]) -> None:
        self._targets = iter([target for target in targets if target.nbytes])
        self._open = np.empty(0, np.uint8)

    def take(self, chunk: Bytes) -> None:
        """The next bytes; there must be room for them."""
        while chunk.nbytes:
            if not self._open.nbytes:
                self._open = next(self._targets)
            size = min(chunk.nbytes, self._open.nbytes)
            self._open[:size] = chunk[:size]
            self._open, chunk = self._open[size:], chunk[size:]
