"""`FilePublisher`: a policy version becomes a folder that engines can load, and that is whole or absent.

Every rank writes its own byte ranges of the safetensors files, hashes its share of them, and the first rank then writes
the manifest and renames the folder into place:

    first rank      .v00000012.tmp/ with heads and room for all bytes
    every rank      its byte ranges                                    (after the first rank)
    every rank      hashes of its share of tensors                     (after all bytes are there)
    first rank      manifest.json, rename to v00000012/, retention     (after all hashes are there)
"""

import mmap
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from loguru import logger
from torch import Tensor, nn

from runtime.errors import StorageError
from trainer.ranks import Ranks
from trainer.weights.local_ranges import local_range, named_weights, spec_of
from trainer.weights.safetensors_layout import MAX_SHARD_BYTES, ShardLayout, make_manifest, plan_shards
from transport.backoff import Backoff
from transport.durable import atomic_write
from transport.outbox.progress import PublishedWeights
from transport.wire.weights import MANIFEST_NAME, AdapterInfo, TensorEntry, WeightManifest, hash_bytes, version_dir

MAX_ATTEMPTS = 5
"""Failed publishes of one version after which the trainer stops with exit code 74."""
BACKOFF = Backoff(0.5, 4.0)
"""Pauses between failed publishes. No jitter: ranks publish together."""


class FilePublisher:
    """Publishes below `root` and keeps the newest `keep` versions. `publish` is collective: every rank calls it."""

    def __init__(
        self,
        root: Path,
        run_id: str,
        keep: int,
        ranks: Ranks,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        adapter: AdapterInfo | None = None,
    ) -> None:
        self._root = root.resolve()  # engines may run in another working directory
        self._run_id = run_id
        self._keep = keep
        self._ranks = ranks
        self._adapter = adapter
        self._max_shard_bytes = max_shard_bytes

    def publish(self, model: nn.Module, version: int) -> PublishedWeights:
        """Publish `model` as `version`, replacing an older publish of it. `StorageError` if the disk refuses."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._publish(named_weights(model), version)
            except StorageError as error:
                self._ranks.wait_together(self._clear_staging)
                if attempt == MAX_ATTEMPTS:
                    raise
                logger.warning(f"publish of version {version} failed ({attempt} of {MAX_ATTEMPTS}): {error}")
            time.sleep(BACKOFF.pause_s(attempt))
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Does nothing: published files stay."""

    @property
    def needs_us(self) -> bool:
        """False: engines load files without this process."""
        return False

    def _clear_staging(self) -> None:
        """Delete what a failed or killed publish left: it takes room."""
        if self._ranks.is_first:
            for leftover in self._root.glob(".v*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _publish(self, weights: dict[str, Tensor], version: int) -> PublishedWeights:
        specs = {name: spec_of(name, tensor) for name, tensor in weights.items()}
        shards = plan_shards(specs.values(), self._max_shard_bytes)
        staging = self._root / f".v{version:08d}.tmp"
        self._ranks.together(lambda: self._make_room(staging, shards))
        self._ranks.together(lambda: self._write_ranges(staging, shards, weights))
        hashes: dict[str, str] = {}
        for part in self._ranks.together(lambda: self._hash_share(staging, shards, specs)):
            hashes |= msgspec.json.decode(part, type=dict[str, str])
        manifest = make_manifest(self._run_id, version, specs.values(), hashes, self._adapter, shards)
        self._ranks.together(lambda: self._reveal(staging, manifest))
        path = version_dir(self._root, version) / MANIFEST_NAME
        return PublishedWeights(version=version, location=str(path), digest=manifest.digest)

    def _make_room(self, staging: Path, shards: Iterable[ShardLayout]) -> bytes:
        self._clear_staging()
        if self._ranks.is_first:
            staging.mkdir(parents=True)
            for shard in shards:
                with (staging / shard.file).open("wb") as file:
                    file.write(shard.head)
                    os.posix_fallocate(file.fileno(), 0, shard.num_bytes)
        return b""

    def _write_ranges(self, staging: Path, shards: Iterable[ShardLayout], weights: dict[str, Tensor]) -> bytes:
        for shard in shards:
            with (staging / shard.file).open("r+b") as file:
                for name, start in shard.starts.items():
                    part = local_range(name, weights[name], is_first=self._ranks.is_first)
                    if part is not None:
                        file.seek(start + part.offset)
                        file.write(part.data)
        return b""

    def _hash_share(self, staging: Path, shards: Iterable[ShardLayout], specs: dict[str, TensorEntry]) -> bytes:
        """Hashes of every `world_size`-th tensor, by name."""
        places = [(shard.file, name, start) for shard in shards for name, start in shard.starts.items()]
        share = places[self._ranks.rank :: self._ranks.world_size]
        return msgspec.json.encode(
            {name: _hash_range(staging / file, slice(at, at + specs[name].num_bytes)) for file, name, at in share}
        )

    def _reveal(self, staging: Path, manifest: WeightManifest) -> bytes:
        if self._ranks.is_first:
            atomic_write(staging / MANIFEST_NAME, msgspec.json.encode(manifest))
            target = version_dir(self._root, manifest.version)
            self._withdraw(target)  # published before a crash; readers that have it open keep their files
            staging.rename(target)
            for expired in self._expired(manifest.version):
                self._withdraw(expired)
            self._clear_staging()
        return b""

    def _withdraw(self, folder: Path) -> None:
        """Take a version away at once: a removal that is cut short must not leave a manifest without its files."""
        if folder.exists():
            folder.rename(self._root / f".{folder.name}.old")

    def _expired(self, newest: int) -> list[Path]:
        """Versions up to `newest` beyond the `keep` newest. Later ones are of before a crash and will be replaced."""
        folders = sorted(path for path in self._root.glob("v*") if path <= version_dir(self._root, newest))
        return folders[: -self._keep]


def _hash_range(path: Path, span: slice) -> str:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
        view[span] as part,
    ):
        return hash_bytes(part)
