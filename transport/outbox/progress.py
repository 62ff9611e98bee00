"""`ReportedProgress`: how far the trainer has come, as the orchestrator was told. Values and transitions, no I/O.

Every transition is idempotent, and every one but `with_fallback` monotonic, so a message that is repeated after a
reconnect or a restart changes nothing, and the order in which repeats arrive does not matter.
"""

import msgspec

from transport.wire.weights import Canary


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy version that the trainer announced."""

    version: int
    location: str = msgspec.field(name="manifest_path")
    """The path of a manifest file, or the address of another channel (`transport/wire/weights.py`)."""
    digest: str
    canary: Canary | None = None


class ReportedProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`last_retired <= last_committed <= last_trained`. 0: none yet."""

    run_id: str
    last_trained: int = 0
    last_committed: int = 0
    """Steps up to this one are in a durable checkpoint."""
    last_retired: int = 0
    """The commit before the last: batches up to it may go. Those after it stay, so that a trainer whose newest
    checkpoint turns out to be corrupt can fall back to the one before."""
    weights: PublishedWeights | None = None

    def with_trained(self, step: int) -> "ReportedProgress":
        """Progress once the optimizer has stepped on batch `step`."""
        return msgspec.structs.replace(self, last_trained=max(step, self.last_trained))

    def with_committed(self, step: int) -> "ReportedProgress":
        """Progress once a durable checkpoint contains batch `step`."""
        if step <= self.last_committed:
            return self
        trained = self.with_trained(step)
        return msgspec.structs.replace(trained, last_committed=step, last_retired=self.last_committed)

    def with_fallback(self, step: int) -> "ReportedProgress":
        """The trainer was started from checkpoint `step`, the one before the newest: that one cannot be used. The
        batches after `step` stay until a later checkpoint than `step` has a successor, as they would have."""
        return msgspec.structs.replace(self, last_committed=max(self.last_retired, min(step, self.last_committed)))

    def with_weights(self, weights: PublishedWeights) -> "ReportedProgress":
        """Version `weights.version` can be loaded.

        A version below the newest is ignored: a trainer that went back to its checkpoint makes it again. The newest
        version under another digest replaces it: that trainer's arithmetic is not deterministic, its weights are new.
        """
        if self.weights is not None and weights.version < self.weights.version:
            return self
        return msgspec.structs.replace(self, weights=weights)
