"""`BatchManifest`: everything a rank needs to plan step N, without a single token.

Columns have one row per sample, in batch order. The samples themselves travel as one frame each, so that a rank
fetches only what it trains; `frame_hashes` lets it check each one.
"""

import msgspec

from transport.errors import CodecError
from transport.wire.sample import EncodedTensor

SCHEMA_VERSION = 3
"""Bumped by every change of a wire type; a peer of another version is refused at `Hello`."""

TEXT, IMAGE = 0, 1
"""Values of the `modality` column."""


class SampleColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row per sample. Integer ids index the tables of the manifest or are local to the batch."""

    lengths: EncodedTensor
    """int32: tokens of the sample."""
    loss_tokens: EncodedTensor
    """int32: trained tokens of the sample."""
    env_ids: EncodedTensor
    """int32: index into `BatchManifest.env_names`."""
    groups: EncodedTensor
    """int32: samples of one group share the number."""
    trajectories: EncodedTensor
    """int32: samples of one trajectory share the number."""
    modalities: EncodedTensor
    """uint8: `TEXT` or `IMAGE`."""
    num_bytes: EncodedTensor
    """int64: size of the sample's frame."""
    oldest_versions: EncodedTensor
    """int32: oldest policy version that sampled any of its tokens, -1 if none did."""
    frame_hashes: EncodedTensor
    """uint64: xxh3_64 of the sample's frame."""


class BatchManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of batch `step`, which trains policy version `step - 1` into `step`."""

    schema_version: int
    run_id: str
    step: int
    digest: str
    """xxh3_128 of the frame hashes in order: two batches with one digest are the same bytes."""
    env_names: tuple[str, ...]
    columns: SampleColumns

    @property
    def num_samples(self) -> int:
        """Number of rows in every column."""
        return self.columns.lengths.shape[0]

    def check(self) -> None:
        """Raise `CodecError` unless every column has its dtype and the same number of rows."""
        if self.step < 1:
            raise CodecError(f"batch step must be at least 1, got {self.step}")
        if len(self.columns.lengths.shape) != 1:
            raise CodecError(f"column lengths of batch {self.step} is not a vector: {self.columns.lengths.shape}")
        dtypes = {"modalities": "uint8", "num_bytes": "int64", "frame_hashes": "uint64"}
        for name in SampleColumns.__struct_fields__:
            column: EncodedTensor = getattr(self.columns, name)
            column.check()
            if column.dtype != dtypes.get(name, "int32") or column.shape != (self.num_samples,):
                raise CodecError(f"column {name} of batch {self.step} is {column.dtype}{list(column.shape)}")
        self._check_values()

    def _check_values(self) -> None:
        lengths, loss_tokens = self.columns.lengths.numpy(), self.columns.loss_tokens.numpy()
        if (lengths < 1).any() or (loss_tokens < 0).any() or (loss_tokens > lengths).any():
            raise CodecError(f"batch {self.step} has an empty sample or one with more loss tokens than tokens")
        if (self.columns.num_bytes.numpy() < 1).any():
            raise CodecError(f"batch {self.step} has a sample without bytes")
        if (self.columns.modalities.numpy() > IMAGE).any():
            raise CodecError(f"batch {self.step} has an unknown modality")
        env_ids = self.columns.env_ids.numpy()
        if env_ids.size and not (env_ids.min() >= 0 and env_ids.max() < len(self.env_names)):
            raise CodecError(f"batch {self.step} has an env id outside its {len(self.env_names)} env names")
