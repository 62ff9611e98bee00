"""`WeightStore`: the newest policy versions in a rank's memory, as far as this rank holds them."""

import threading

from transport.errors import WeightsError
from transport.tensor import Buffer
from transport.weights import WeightOffer


class WeightStore:
    """Holds at most `keep` versions: what was put last. Written by the trainer, read by the server's thread."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[int, tuple[WeightOffer, Buffer]] = {}

    def put(self, offer: WeightOffer, data: Buffer) -> None:
        """Offer a version, in the place of an older publish of it, and forget the oldest beyond `keep`.

        `data` are the ranges of this rank, end to end; nobody may change them any more.
        """
        with self._lock:
            self._versions.pop(offer.manifest.version, None)
            self._versions[offer.manifest.version] = (offer, data)
            while len(self._versions) > self._keep:
                del self._versions[next(iter(self._versions))]

    def offer(self, version: int) -> WeightOffer:
        """Raises `WeightsError`, naming what there is."""
        return self._find(version)[0]

    def read(self, version: int, offset: int, num_bytes: int) -> memoryview:
        """A view of some of the bytes. Raises `WeightsError` if this rank does not hold them all."""
        data = self.all(version)
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > data.nbytes:
            raise WeightsError(f"bytes {offset} to {offset + num_bytes} are not held here: there are {data.nbytes}")
        return data[offset : offset + num_bytes]

    def all(self, version: int) -> memoryview:
        """A view of all bytes that this rank holds of a version."""
        return memoryview(self._find(version)[1])

    def _find(self, version: int) -> tuple[WeightOffer, Buffer]:
        with self._lock:
            if version not in self._versions:
                raise WeightsError(f"version {version} is not held here (any more): there are {list(self._versions)}")
            return self._versions[version]
