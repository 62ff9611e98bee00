"""`WeightRanks`: the weight servers of a few ranks, each with its rows of every tensor. No torch."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from transport.weights.server import WeightServer, WeightStore
from transport.wire.weights import (
    Channel,
    TensorEntry,
    WeightManifest,
    WeightOffer,
    WeightRange,
    hash_bytes,
    location_of,
    weights_digest,
)

Tensors = Mapping[str, npt.NDArray[np.float32]]


def make_offer(
    tensors: Tensors, version: int, servers: tuple[str, ...], run_id: str = "default"
) -> tuple[WeightOffer, list[bytes]]:
    """The offer, and what each server holds of it."""
    entries = tuple(
        TensorEntry(name=name, dtype="float32", shape=value.shape, shard="", hash=hash_bytes(value.tobytes()))
        for name, value in tensors.items()
    )
    held, ranges = [b""] * len(servers), []
    for name, value in tensors.items():
        offset = 0
        for number, rows in enumerate(np.array_split(value, len(servers))):
            if rows.nbytes:
                ranges.append(WeightRange(name, offset, rows.nbytes, number))
            held[number] += rows.tobytes()
            offset += rows.nbytes
    digest = weights_digest((entry.name, entry.dtype, entry.shape, entry.hash) for entry in entries)
    manifest = WeightManifest(run_id=run_id, version=version, tensors=entries, shards=(), digest=digest)
    return WeightOffer(manifest=manifest, servers=servers, ranges=tuple(ranges)), held


class WeightRanks:
    """`with WeightRanks(2) as ranks: ranks.put(tensors, 1)`; engines fetch from `ranks.location`."""

    def __init__(
        self,
        num_ranks: int = 2,
        *,
        run_id: str = "default",
        keep: int = 99,
        stores: Sequence[WeightStore] = (),
        **options: object,
    ) -> None:
        self.stores = stores or [WeightStore(keep) for _ in range(num_ranks)]
        self.run_id = run_id
        self._channel = Channel.COLLECTIVE if "open_group" in options else Channel.ZMQ
        self.servers = [
            WeightServer("tcp://127.0.0.1:0", run_id, store, **options)  # type: ignore[arg-type]
            for store in self.stores
        ]
        self._stack = ExitStack()

    def __enter__(self) -> "WeightRanks":
        for server in self.servers:
            self._stack.enter_context(server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(server.endpoint for server in self.servers)

    @property
    def location(self) -> str:
        return location_of(self._channel, self.endpoints[0])

    def put(self, tensors: Tensors, version: int, *, damage: bool = False, via: tuple[str, ...] | None = None) -> str:
        """Serve a version; its location. `damage` flips a byte after the hashes were made, `via` names proxies."""
        offer, held = make_offer(tensors, version, via or self.endpoints, self.run_id)
        if damage:
            held[-1] = held[-1][:-1] + bytes([held[-1][-1] ^ 1])
        for store, data in zip(self.stores, held, strict=True):
            store.put(offer, bytearray(data))
        return self.location
