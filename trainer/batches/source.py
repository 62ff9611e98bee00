"""`BatchSource`: where batches come from: the orchestrator's batch server, recorded files, or thin air (fake data)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample


class NoBatch(StrEnum):
    """Why there is no next batch."""

    END = "end"
    """The run is over."""
    STOP = "stop"
    """This process was asked to stop."""


class BatchSource(Protocol):
    """One rank's link. Every wait on a peer has a deadline. Telling it about a step twice changes nothing."""

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        """Batch `step`, waiting for it as long as the peer lives and no stop is requested."""
        ...

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """One sample per row of the batch, in the order asked, checked against the manifest's hashes."""
        ...

    def published(self, weights: PublishedWeights) -> None:
        """A policy version can be loaded."""
        ...

    def trained(self, step: int) -> None:
        """The optimizer has stepped on batch `step`. Called on every rank; the first one tells the peer."""
        ...

    def committed(self, step: int) -> None:
        """A durable checkpoint contains batch `step`. Called on every rank; the first one tells the peer."""
        ...

    def close(self, reason: str) -> None:
        """Leave, on purpose. Never raises for a peer that is gone."""
        ...


class Unattended:
    """The half of a `BatchSource` that talks, for sources without a peer: nobody is told, nothing is open."""

    def published(self, weights: PublishedWeights) -> None:
        """Nobody to tell."""

    def trained(self, step: int) -> None:
        """Nobody to tell."""

    def committed(self, step: int) -> None:
        """Nobody to tell: batches stay."""

    def close(self, reason: str) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Batch:
    """Batch `step`, of which a rank fetches what it trains."""

    manifest: BatchManifest
    source: BatchSource

    @property
    def step(self) -> int:
        """Its number, from 1."""
        return self.manifest.step

    def fetch(self, rows: Sequence[int]) -> dict[int, TrainingSample]:
        """Samples by row."""
        return dict(zip(rows, self.source.samples(self.manifest, rows), strict=True))


class FinishedRun(Unattended):
    """A `BatchSource` without batches."""

    def manifest(self, step: int) -> NoBatch:
        """The run is over."""
        return NoBatch.END

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """Never asked for: there is no batch."""
        raise AssertionError(f"samples of batch {manifest.step} of a finished run")
