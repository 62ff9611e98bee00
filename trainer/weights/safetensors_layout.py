"""Where every byte of a safetensors file goes, computed from names, types and shapes alone.

Ranks that know the global shapes know the same layout without talking, so each writes its own byte ranges. The bytes
are those of `safetensors.torch.save_file(..., metadata={"format": "pt"})`: tensors by falling item size, then by name.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from transport.wire.sample import DTYPE_BYTES
from transport.wire.weights import AdapterInfo, ShardEntry, TensorEntry, WeightManifest, publish_digest

MAX_SHARD_BYTES = 4 * 1024**3
_CODES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True)
class ShardLayout:
    """One safetensors file: its head, and the offset in the file at which each tensor starts."""

    file: str
    head: bytes
    starts: dict[str, int]
    num_bytes: int


def plan_shards(specs: Iterable[TensorEntry], max_bytes: int = MAX_SHARD_BYTES) -> list[ShardLayout]:
    """Files of at most `max_bytes` of data (a larger tensor has its own), named as Hugging Face does."""
    groups: list[list[TensorEntry]] = [[]]
    room = max_bytes
    for spec in sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name)):
        if groups[-1] and spec.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(spec)
        room -= spec.num_bytes
    names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
    return [_layout(name, group) for name, group in zip(names, groups, strict=True)]


def _layout(file: str, specs: Sequence[TensorEntry]) -> ShardLayout:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for spec in specs:
        starts[spec.name] = end
        end += spec.num_bytes
        table[spec.name] = {
            "dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [starts[spec.name], end]
        }  # fmt: skip
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return ShardLayout(file, head, {name: len(head) + start for name, start in starts.items()}, len(head) + end)


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
