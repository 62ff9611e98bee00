"""`MemoryPublisher`: a policy version in the ranks' memory, served to engines. No file, no gather to one rank.

The channels `zmq` and `collective` differ only in how the bytes travel (`transport/weights/server.py`, `broadcast.py`).

every rank      copies its byte ranges                               (the optimizer changes the parameters in place)
every rank      hashes its share of the tensors                      (one whole tensor at a time)
every rank      learns of all ranges and hashes, and offers them     (the first rank's address is announced)
"""

from contextlib import ExitStack

import msgspec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.ranks import Ranks
from trainer.weights.local_ranges import local_range, named_weights, raw_bytes, spec_of
from trainer.weights.safetensors_layout import make_manifest
from transport.outbox.progress import PublishedWeights
from transport.weights.server import WeightServer, WeightStore
from transport.wire.weights import AdapterInfo, Channel, WeightOffer, WeightRange, hash_bytes, location_of


class RankShare(msgspec.Struct, frozen=True):
    """What one rank tells the others of a publish."""

    endpoint: str
    ranges: list[tuple[str, int, int]]
    """Name, offset and size of what it holds, end to end."""
    hashes: dict[str, str]
    """Of the tensors that were its to hash."""


class MemoryPublisher:
    """Implements `WeightChannel`. `server` must be entered; it is closed with this."""

    def __init__(
        self,
        run_id: str,
        ranks: Ranks,
        store: WeightStore,
        server: WeightServer,
        address: str,
        adapter: AdapterInfo | None = None,
        channel: Channel = Channel.ZMQ,
    ) -> None:
        self._run_id = run_id
        self._ranks = ranks
        self._store = store
        self._server = server
        self._address = address
        self._adapter = adapter
        self._channel = channel
        self._closing = ExitStack()
        self._closing.push(server)

    @property
    def needs_us(self) -> bool:
        """True: the weights are in the memory of this process."""
        return True

    def publish(self, model: nn.Module, version: int) -> PublishedWeights:
        """Offer `model` as `version`. `WeightsError` if this rank's server has died: no engine could fetch it."""
        self._server.check()
        weights = named_weights(model)
        ranges, data = self._snapshot(weights)
        mine = RankShare(self._address, ranges, self._hash_share(weights))
        shares = [msgspec.json.decode(part, type=RankShare) for part in self._ranks.gather(msgspec.json.encode(mine))]
        offer = make_offer(self._run_id, version, weights, shares, self._adapter)
        self._store.put(offer, data)
        self._ranks.barrier()  # who hears of a version may fetch from every rank
        self._server.check()
        location = location_of(self._channel, shares[0].endpoint)
        return PublishedWeights(version=version, location=location, digest=offer.manifest.digest)

    def close(self) -> None:
        """Stop serving engines."""
        self._closing.close()

    def _snapshot(self, weights: dict[str, Tensor]) -> tuple[list[tuple[str, int, int]], bytearray]:
        parts = [
            part
            for name, tensor in weights.items()
            if (part := local_range(name, tensor, is_first=self._ranks.is_first)) is not None and part.data.nbytes
        ]
        ranges = [(part.name, part.offset, part.data.nbytes) for part in parts]
        return ranges, bytearray().join(part.data for part in parts)

    def _hash_share(self, weights: dict[str, Tensor]) -> dict[str, str]:
        """Hashes of every `world_size`-th tensor. All ranks gather each, so that none waits for bytes of another."""
        hashes: dict[str, str] = {}
        for number, (name, tensor) in enumerate(weights.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if number % self._ranks.world_size == self._ranks.rank:
                hashes[name] = hash_bytes(raw_bytes(whole))
        return hashes


def make_offer(
    run_id: str, version: int, weights: dict[str, Tensor], shares: list[RankShare], adapter: AdapterInfo | None = None
) -> WeightOffer:
    """The offer that these shares make up. The same on every rank."""
    hashes = {name: value for share in shares for name, value in share.hashes.items()}
    specs = (spec_of(name, tensor) for name, tensor in weights.items())
    return WeightOffer(
        manifest=make_manifest(run_id, version, specs, hashes, adapter),
        servers=tuple(share.endpoint for share in shares),
        ranges=tuple(
            WeightRange(name, offset, num_bytes, server)
            for server, share in enumerate(shares)
            for name, offset, num_bytes in share.ranges
        ),
    )
