"""`BatchSource`: where batches come from. `ProgressReports`: who hears what became of them.

Four layers between the training loop and the socket:

    trainer.loop
      Inbox, Reporter      all ranks ask, or tell, together                      (trainer/batches/inbox.py)
      OrchestratorLink     errors to exit codes, waits to /health                (trainer/batches/orchestrator.py)
      BatchClient          one question or report per call, hashes checked       (transport/client/client.py)
      Link                 new connection, `Hello` and request after a fault     (transport/client/link.py)
    Connection             the DEALER socket itself                              (transport/client/connection.py)

A recording, fake data and a finished run are sources without a receiver of reports.
"""

from collections.abc import Sequence
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
    """Gives batches to one rank. Every wait on a peer has a deadline."""

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        """Batch `step`, waiting for it as long as the peer lives and no stop is requested."""
        ...

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """One sample per row of the batch, in the order asked, checked against the manifest's hashes."""
        ...

    def close(self, reason: str) -> None:
        """Leave, on purpose. Never raises for a peer that is gone."""
        ...


class ProgressReports(Protocol):
    """Hears from one rank what became of batches. Every wait on a peer has a deadline; a repeat changes nothing."""

    def published(self, weights: PublishedWeights) -> None:
        """A policy version can be loaded."""
        ...

    def trained(self, step: int) -> None:
        """The optimizer has stepped on batch `step`. Called on every rank; the first one tells the peer."""
        ...

    def committed(self, step: int) -> None:
        """A durable checkpoint contains batch `step`. Called on every rank; the first one tells the peer."""
        ...


class NoReports:
    """`ProgressReports` of a run without an orchestrator: does nothing."""

    def published(self, weights: PublishedWeights) -> None:
        pass

    def trained(self, step: int) -> None:
        pass

    def committed(self, step: int) -> None:
        pass


class FinishedRun:
    """The `BatchSource` of a run that has ended: there is no further batch."""

    def manifest(self, step: int) -> NoBatch:
        return NoBatch.END

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """Never called: there is no batch."""
        raise AssertionError(f"samples of batch {manifest.step} of a finished run")

    def close(self, reason: str) -> None:
        """Does nothing: there is no connection."""
