"""`BatchClient`: a trainer rank's side of the link. Plain blocking calls; each survives a server that restarts.

    with BatchClient("tcp://127.0.0.1:29600", "run", rank=rank, world_size=world_size, last_committed=step) as client:
        client.hello()
        while (manifest := client.manifest(step + 1)) is not None:      # None: the run has ended
            samples = client.samples(manifest, rows)                    # only these rows travel
            ...
            client.weights_published(step + 1, path, digest)            # rank 0
            client.trained(step + 1)                                    # every rank
            client.committed(step + 1)                                  # every rank, after the durable checkpoint

All calls raise `Refused` or `SchemaMismatch` when the server will not talk to this rank, `RequestFailed` when it
cannot serve the request, and `PeerTimeout` when it is gone for `lost_timeout_s` (`connect_timeout_s` in `hello`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from transport.client.connection import Received
from transport.client.link import Link
from transport.errors import CodecError, CorruptFrame, RequestFailed
from transport.security.keys import CurveKeys
from transport.wire.codec import check_manifest, decode_rows, int32
from transport.wire.manifest import SCHEMA_VERSION, BatchManifest
from transport.wire.messages import (
    Ack,
    ClientMessage,
    Committed,
    EndOfRun,
    Failure,
    GetManifest,
    GetSamples,
    Hello,
    Limits,
    Manifest,
    NotReady,
    Ping,
    Samples,
    ServerMessage,
    Trained,
    WeightsPublished,
)
from transport.wire.sample import TrainingSample
from transport.wire.weights import Canary

_MAX_FETCHES = 3
"""Tries for a reply whose bytes do not have the promised hash."""
_FETCH_BYTES = 16 << 20
"""What is asked for at once, if a reply may have so much. The server holds a reply until it has left, and two or three
of them when its machine is busy: with more, that memory is felt; with less, the round trips are."""
_MAX_REASON_CHARS = 500


def _ignore(news: str) -> None:
    """Does nothing: the default of `on_wait` and `on_link`."""


class BatchClient:
    """One rank's link to the batch server of run `run_id`. Use it from one thread at a time.

    `on_wait` hears what a blocked call waits for, and may raise to end it. `on_link` hears what is wrong with the
    connection as soon as it is noticed, in a blocked call or by a heartbeat in a thread, and `""` when it is back.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        last_committed: int = 0,
        keys: CurveKeys | None = None,
        limits: Limits | None = None,
        connect_timeout_s: float = 60.0,
        peer_timeout_s: float = 3.0,
        lost_timeout_s: float = 600.0,
        heartbeat_s: float = 1.0,
        on_wait: Callable[[str], None] = _ignore,
        on_link: Callable[[str], None] = _ignore,
    ) -> None:
        self._run_id = run_id
        self._rank = rank
        self._world_size = world_size
        self._last_committed = last_committed
        self._limits = limits or Limits()
        self._connect_timeout_s = connect_timeout_s
        self._lost_timeout_s = lost_timeout_s
        self._on_wait = on_wait
        self._link = Link(
            endpoint,
            self._introduction,
            keys=keys,
            limits=self._limits,
            peer_timeout_s=peer_timeout_s,
            heartbeat_s=heartbeat_s,
            on_wait=lambda news: on_wait(f"orchestrator: {news}"),
            on_link=on_link,
        )

    def __enter__(self) -> "BatchClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("done" if error is None else f"{type(error).__name__}: {error}")

    def hello(self) -> int:
        """Greet the server; returns the step to continue with."""
        self._link.connect(self._connect_timeout_s)
        return self._last_committed + 1

    def manifest(self, step: int) -> BatchManifest | None:
        """The checked manifest of batch `step`; None if the run ends before it.

        Waits as long as the server says that the batch is to come; `on_wait` hears, about once a second, what the
        orchestrator itself waits for, and may raise to end the wait.
        """
        while True:
            match self._ask(lambda seq: GetManifest(seq=seq, step=step))[0]:
                case EndOfRun():
                    return None
                case NotReady(waiting_for=waiting_for):
                    self._on_wait(waiting_for or f"batch {step}")
                case Manifest(manifest=manifest):
                    self._check(step, manifest)
                    return manifest
                case other:
                    raise _unexpected(other)

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> list[TrainingSample]:
        """The samples of `rows` of a batch, in that order, each checked against the manifest's hash.

        Fetched piece by piece, within `Limits.max_reply_bytes`; `CorruptFrame` if one arrives damaged several times.
        """
        limit = min(_FETCH_BYTES, self._limits.max_reply_bytes)
        chunks = _chunks(rows, manifest.columns.num_bytes.numpy(), limit)
        return [sample for chunk in chunks for sample in self._fetch(manifest, chunk)]

    def weights_published(self, version: int, location: str | Path, digest: str, canary: Canary | None = None) -> None:
        """Policy `version` can be loaded from `location`."""
        path = str(location)
        self._report(
            lambda seq: WeightsPublished(seq=seq, version=version, location=path, digest=digest, canary=canary)
        )

    def trained(self, step: int) -> None:
        """The optimizer stepped on batch `step`.

        The first rank tells the server. The others see that it is there: should it be away, all ranks wait for it.
        """
        if self._rank == 0:
            self._report(lambda seq: Trained(seq=seq, step=step))
        else:
            self._ask(lambda seq: Ping(seq=seq))

    def committed(self, step: int) -> None:
        """A durable checkpoint contains batch `step`: the orchestrator may forget it.

        The first rank tells the server. The others must know it, too: a `Hello` that names a step whose batches are
        retired is refused, and every new connection begins with one.
        """
        self._last_committed = max(step, self._last_committed)
        if self._rank == 0:
            self._report(lambda seq: Committed(seq=seq, step=step))

    def close(self, reason: str = "done") -> None:
        """Say goodbye if the server is there, and free the socket. Never raises. May be called while another thread is
        blocked in a call, which then ends with `PeerTimeout`."""
        self._link.close(reason[:_MAX_REASON_CHARS])

    def _introduction(self, seq: int) -> Hello:
        return Hello(
            seq=seq,
            schema_version=SCHEMA_VERSION,
            run_id=self._run_id,
            rank=self._rank,
            world_size=self._world_size,
            last_committed=self._last_committed,
        )

    def _fetch(self, manifest: BatchManifest, rows: list[int]) -> list[TrainingSample]:
        def request(seq: int) -> GetSamples:
            return GetSamples(seq=seq, step=manifest.step, indices=int32(rows))

        for attempt in range(1, _MAX_FETCHES + 1):
            reply, frames = self._ask(request)
            if not isinstance(reply, Samples):
                raise _unexpected(reply)
            try:
                return decode_rows(manifest, rows, frames)
            except CodecError as error:
                if attempt == _MAX_FETCHES:
                    raise CorruptFrame(f"batch {manifest.step} arrived damaged {attempt} times: {error}") from error
        raise AssertionError("unreachable")

    def _check(self, step: int, manifest: BatchManifest) -> None:
        check_manifest(manifest)
        if (manifest.step, manifest.run_id) != (step, self._run_id):
            raise CodecError(f"asked for batch {step} of {self._run_id}, got {manifest.step} of {manifest.run_id}")

    def _report(self, make: Callable[[int], ClientMessage]) -> None:
        reply, _ = self._ask(make)
        if not isinstance(reply, Ack):
            raise _unexpected(reply)

    def _ask(self, make: Callable[[int], ClientMessage]) -> Received:
        reply, frames = self._link.ask(make, self._lost_timeout_s)
        if isinstance(reply, Failure):
            raise RequestFailed(reply.reason)
        return reply, frames


def _unexpected(reply: ServerMessage) -> CodecError:
    return CodecError(f"the server answered with {type(reply).__name__}, which does not belong to the question")


def _chunks(
    rows: Sequence[int], sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]", limit: int
) -> Iterator[list[int]]:
    """`rows` in order, in pieces of at most `limit` bytes; a row above it comes alone."""
    chunk: list[int] = []
    num_bytes = 0
    for row in rows:
        size = int(sizes[row])
        if chunk and num_bytes + size > limit:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(row)
        num_bytes += size
    if chunk:
        yield chunk
