"""`Progress`: how far the trainer has come, as the orchestrator was told. Values and transitions, no I/O.

Every transition is monotonic and idempotent, so a message that is repeated after a reconnect or a restart changes
nothing, and the order in which repeats arrive does not matter.
"""

import msgspec


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy version that the trainer announced."""

    version: int
    manifest_path: str
    digest: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`last_committed <= last_trained`; steps up to `last_committed` are in a durable checkpoint. 0: none yet."""

    run_id: str
    last_trained: int = 0
    last_committed: int = 0
    weights: PublishedWeights | None = None
    """The newest announcement."""

    def with_trained(self, step: int) -> "Progress":
        """The optimizer stepped on batch `step`."""
        return msgspec.structs.replace(self, last_trained=max(step, self.last_trained))

    def with_committed(self, step: int) -> "Progress":
        """A durable checkpoint contains batch `step`."""
        trained = self.with_trained(step)
        return msgspec.structs.replace(trained, last_committed=max(step, self.last_committed))

    def with_weights(self, weights: PublishedWeights) -> "Progress":
        """Version `weights.version` can be loaded.

        A version below the newest is ignored: a trainer that went back to its checkpoint makes it again. The newest
        version under another digest replaces it: that trainer's arithmetic is not deterministic, its weights are new.
        """
        if self.weights is not None and weights.version < self.weights.version:
            return self
        return msgspec.structs.replace(self, weights=weights)
