"""`WeightChannel`: how engines get a policy version, and the manifest of one, whatever the channel."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from torch import nn

from trainer.safetensors_layout import ShardLayout
from transport.outbox.progress import PublishedWeights
from transport.wire.weights import AdapterInfo, ShardEntry, TensorEntry, WeightManifest, publish_digest


class WeightChannel(Protocol):
    """How policy versions reach engines. `publish` is collective: every rank calls it."""

    @property
    def needs_us(self) -> bool:
        """Whether engines can load a version only while this process lives."""
        ...

    def publish(self, model: nn.Module, version: int) -> PublishedWeights:
        """Make `model` loadable as `version`, in the place of an older publish of it."""
        ...

    def close(self) -> None:
        """Serve no more. Idempotent."""
        ...


def make_manifest(
    run_id: str,
    version: int,
    specs: Iterable[TensorEntry],
    hashes: Mapping[str, str],
    adapter: AdapterInfo | None,
    shards: Sequence[ShardLayout] = (),
) -> WeightManifest:
    """The manifest of tensors as `spec_of` describes them; `hashes` has one entry per tensor."""
    files = {name: shard.file for shard in shards for name in shard.starts}
    tensors = tuple(
        msgspec.structs.replace(spec, shard=files.get(spec.name, ""), hash=hashes[spec.name]) for spec in specs
    )
    return WeightManifest(
        run_id=run_id,
        version=version,
        tensors=tensors,
        shards=tuple(ShardEntry(file=shard.file, num_bytes=shard.num_bytes) for shard in shards),
        digest=publish_digest(tensors, adapter),
        adapter=adapter,
    )
