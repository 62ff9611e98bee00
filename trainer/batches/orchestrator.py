"""`OrchestratorLink`: batches from a live orchestrator, over this rank's own DEALER socket.

The client below reconnects on its own. This turns its errors into exit codes, shows what it waits for in `/health`,
and lets a stop request end a wait. A report that a stop cut short is made up for by the `Hello` of the next start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loguru import logger

from runtime.errors import PeerLostError, StorageError, UserError
from runtime.health.health import Health
from trainer.batches.link_keys import load_keys
from trainer.batches.source import NoBatch
from trainer.config.trainer import OrchestratorLinkConfig
from trainer.errors import StopWaiting
from trainer.ranks import Ranks
from transport.client.client import BatchClient
from transport.errors import CodecError, PeerTimeout, Refused, RequestFailed, SchemaMismatch
from transport.outbox.progress import PublishedWeights
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample

PEER = "orchestrator"


class OrchestratorLink:
    """A `BatchSource` that also takes `ProgressReports`. `PeerLostError` when the orchestrator stays away,
    `UserError` when it refuses this run."""

    def __init__(
        self,
        config: OrchestratorLinkConfig,
        run_id: str,
        ranks: Ranks,
        *,
        last_committed: int,
        health: Health,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._health = health
        self._stop_requested = stop_requested
        self._waiting_for = ""
        self._interruptible = True
        self._client = BatchClient(
            config.endpoint,
            run_id,
            rank=ranks.rank,
            world_size=ranks.world_size,
            last_committed=last_committed,
            keys=load_keys(config),
            connect_timeout_s=config.connect_timeout_s,
            peer_timeout_s=config.peer_timeout_s,
            lost_timeout_s=config.lost_timeout_s,
            on_wait=self._on_wait,
            on_link=self._on_link,
        )

    def connect(self) -> None:
        self._report("to answer", self._client.hello)

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        try:
            with self._call(f"batch {step} from the orchestrator", interruptible=True):
                return self._client.manifest(step) or NoBatch.END
        except StopWaiting:
            return NoBatch.STOP

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        """Rows of a batch. Its step has begun on all ranks, so a stop request does not end this wait."""
        with self._call(f"samples of batch {manifest.step}", interruptible=False):
            return self._client.samples(manifest, rows)

    def published(self, weights: PublishedWeights) -> None:
        self._report(
            f"to note version {weights.version}",
            lambda: self._client.weights_published(weights.version, weights.location, weights.digest, weights.canary),
        )

    def trained(self, step: int) -> None:
        self._report(f"to note step {step}", lambda: self._client.trained(step))

    def committed(self, step: int) -> None:
        self._report(f"to note the checkpoint of step {step}", lambda: self._client.committed(step))

    def close(self, reason: str) -> None:
        self._client.close(reason)

    def _report(self, what: str, call: Callable[[], object]) -> None:
        try:
            with self._call(f"the orchestrator {what}", interruptible=True):
                call()
        except StopWaiting:
            logger.warning(
                f"stopping without waiting for the orchestrator {what}: it will hear of it at the next start"
            )

    @contextmanager
    def _call(self, what: str, *, interruptible: bool) -> Iterator[None]:
        self._waiting_for, self._interruptible = what, interruptible
        try:
            with self._health.waiting(what, peer=PEER):
                yield
        except PeerTimeout as error:
            raise PeerLostError(f"lost the orchestrator while waiting for {what}: {error}") from error
        except (Refused, SchemaMismatch) as error:
            raise UserError(str(error)) from error
        except (RequestFailed, CodecError) as error:  # the bytes are damaged where they lie, or on every way here
            raise StorageError(f"the orchestrator cannot give {what}: {error}") from error

    def _on_link(self, problem: str) -> None:
        """The connection was lost or is back, perhaps noticed by a heartbeat during a step."""
        self._health.set_facts(orchestrator=problem or "connected")

    def _on_wait(self, peer_waits_for: str) -> None:
        """Called about once a second during a wait. The client has deadlines of its own, so waiting is not a stall."""
        if self._interruptible and self._stop_requested():
            raise StopWaiting
        self._health.progress()
        self._health.waiting_for(self._waiting_for, peer=PEER, detail=peer_waits_for)
