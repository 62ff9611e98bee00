"""`WeightManifest`: a published policy version, and the digest that proves an engine serves it.

On disk, a publish is a folder `weights/v00000012/` with safetensors shards; `manifest.json` is written last, by rename,
so a folder without it does not exist. The digest is a function of names, dtypes, shapes and bytes alone: trainer and
engine compute it each from its own tensors, and equal digests mean equal weights, however they were sharded.

A publish may be a LoRA adapter: then its tensors are pairs `<module>.lora_A.weight`, `<module>.lora_B.weight`, and its
digest also covers the base model and the scale, so that equal digests still mean equal policies.
"""

import itertools
import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from transport.errors import CodecError, WeightsError
from transport.wire.sample import DTYPE_BYTES, DType, EncodedTensor

MANIFEST_NAME = "manifest.json"


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter and where its bytes are."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shard: str
    """File name of the shard that holds it; empty where the publish has no files."""
    hash: str
    """xxh3_128 of its raw bytes."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One safetensors file of the publish."""

    file: str
    num_bytes: int


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a publish an adapter: the weight `W` of each module becomes `W + alpha / rank * B @ A`."""

    rank: int
    alpha: int
    base_digest: str
    """`weights_digest` of the model that the adapter was trained on, all of its tensors."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The head of a publish. `digest` equals `publish_digest(tensors, adapter)`."""

    run_id: str
    version: int
    tensors: tuple[TensorEntry, ...]
    shards: tuple[ShardEntry, ...]
    digest: str
    adapter: AdapterInfo | None = None
    """`None`: the tensors are a whole model; else they are this adapter."""


class WeightRange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes `offset ... offset + num_bytes` of tensor `name` are held by server number `server` of the offer.

    A server holds its ranges end to end, in the order of the offer.
    """

    name: str
    offset: int
    num_bytes: int
    server: int


class WeightOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A publish that lies in the memory of the trainer's ranks: who serves which bytes of it."""

    manifest: WeightManifest
    servers: tuple[str, ...]
    """ZeroMQ endpoints."""
    ranges: tuple[WeightRange, ...]
    """They cover every byte of every tensor exactly once."""


class BroadcastGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A torch process group of two that a trainer rank has opened: it is rank 0 and root, the engine is rank 1."""

    host: str
    port: int
    """TCP port of the group's rendezvous store, on rank 0."""
    backend: str
    """`gloo`, `nccl`, ..."""
    chunk_bytes: int
    """Size of each broadcast but the last, as uint8."""
    timeout_s: float
    """How long either side waits for the other, in each step: to join, and to pass on a chunk. The engine waits less
    when its own transfer must end sooner."""


def hash_bytes(data: bytes | memoryview) -> str:
    """xxh3_128 in hex, the hash of tensors."""
    return xxhash.xxh3_128_hexdigest(data)


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Digest of `(name, dtype, shape, hash)` rows, independent of their order."""
    state = xxhash.xxh3_128()
    for name, dtype, shape, tensor_hash in sorted(tensors):
        state.update(f"{name}|{dtype}|{','.join(map(str, shape))}|{tensor_hash}\n".encode())
    return state.hexdigest()


def publish_digest(tensors: Iterable[TensorEntry], adapter: AdapterInfo | None = None) -> str:
    """Digest of the policy that a publish makes: of its tensors, and of what they stand on if they are an adapter."""
    digest = weights_digest((entry.name, entry.dtype, entry.shape, entry.hash) for entry in tensors)
    return digest if adapter is None else adapter_digest(digest, adapter)


def adapter_digest(tensors_digest: str, adapter: AdapterInfo) -> str:
    """Digest of a base model with an adapter; `tensors_digest` is that of the adapter's tensors."""
    return hash_bytes(f"{tensors_digest}|{adapter.rank}|{adapter.alpha}|{adapter.base_digest}".encode())


def version_dir(root: Path, version: int) -> Path:
    """Folder of policy `version` below the run's `weights/` folder."""
    return root / f"v{version:08d}"


def read_weight_manifest(path: Path) -> WeightManifest:
    """Read and check a manifest file; `WeightsError` says what is wrong with it."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
    except FileNotFoundError as error:
        raise WeightsError(f"no weight manifest at {path}: the publish is incomplete or was cleaned up") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WeightsError(
            f"weight manifest {path} does not decode: {error} (if another version of this program wrote it: "
            "the trainer publishes again when it starts)"
        ) from error
    check_digest(manifest, str(path))
    return manifest


def check_digest(manifest: WeightManifest, origin: str) -> None:
    """Raise `WeightsError`, naming `origin`, unless the digest is that of the tensors."""
    digest = publish_digest(manifest.tensors, manifest.adapter)
    if digest != manifest.digest:
        raise WeightsError(f"weight manifest {origin} is inconsistent: digest {manifest.digest}, tensors say {digest}")


def check_offer(offer: WeightOffer, origin: str, *, version: int, run_id: str, max_bytes: int) -> None:
    """Raise `WeightsError` unless the offer is sound, is what was asked for, and fits into `max_bytes`."""
    manifest = offer.manifest
    check_digest(manifest, f"of {origin}")
    if (manifest.version, manifest.run_id) != (version, run_id):
        raise WeightsError(f"{origin} offers version {manifest.version} of {manifest.run_id!r}, not {version}")
    sizes = {entry.name: entry.num_bytes for entry in manifest.tensors}
    if len(sizes) != len(manifest.tensors) or any(size < 0 for entry in manifest.tensors for size in entry.shape):
        raise WeightsError(f"{origin} offers two tensors of one name, or one of a negative size")
    if sum(sizes.values()) > max_bytes:
        raise WeightsError(f"{origin} offers {sum(sizes.values())} bytes, the limit is {max_bytes}")
    if any(not 0 <= piece.server < len(offer.servers) or piece.num_bytes <= 0 for piece in offer.ranges):
        raise WeightsError(f"{origin} offers a range that no server holds")
    by_name = {
        name: sorted((piece.offset, piece.offset + piece.num_bytes) for piece in pieces)
        for name, pieces in itertools.groupby(sorted(offer.ranges, key=lambda piece: piece.name), lambda p: p.name)
    }
    for name in sizes.keys() | by_name.keys():
        ends = [0, *(edge for piece in by_name.get(name, []) for edge in piece), sizes.get(name, -1)]
        if any(left != right for left, right in zip(ends[::2], ends[1::2], strict=True)):
            raise WeightsError(f"the ranges of {origin} do not cover {name} exactly once")


class Channel(StrEnum):
    """How weights travel from the trainer to the engines. Where a publish is, is one string:

    /runs/a/weights/v00000012/manifest.json     files that trainer and engines both see
    zmq:tcp://10.0.0.1:29700                    the weight server of the trainer's first rank
    collective:tcp://10.0.0.1:29700             the same; the bytes come over a torch process group

    The orchestrator passes it on and does not read it.
    """

    FILESYSTEM = "filesystem"
    """Safetensors files on a disk that both see."""
    ZMQ = "zmq"
    """From the memory of the trainer's ranks, over ZeroMQ."""
    COLLECTIVE = "collective"
    """From the memory of the trainer's ranks, by broadcast in a torch process group, arranged over ZeroMQ."""


def location_of(channel: Channel, address: str) -> str:
    """The string for `address` on `channel`; a file's address is its path."""
    return address if channel is Channel.FILESYSTEM else f"{channel.value}:{address}"


def parse_location(location: str) -> tuple[Channel, str]:
    """Channel and address. A text that names no other channel is a path."""
    prefix, colon, address = location.partition(":")
    named = {channel.value: channel for channel in Channel if channel is not Channel.FILESYSTEM}
    return (named[prefix], address) if colon and prefix in named else (Channel.FILESYSTEM, location)


MAX_CANARY_TOKENS = 1024


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy version says to a fixed prompt. `check()` holds for every canary that was announced.

    Version and digest are what an engine *says* that it serves. The canary is what it *does*: the trainer computes,
    under the weights it publishes, the log probability of the likeliest next token after some prefixes of a fixed
    prompt. An engine that answers greedily must come to the same numbers. The likeliest token itself is not
    compared: where two are nearly equal, rounding decides; its log probability hardly changes.
    """

    token_ids: EncodedTensor
    """int32[T]: the prompt."""
    lengths: EncodedTensor
    """int32[P]: how many of its tokens each prefix has."""
    logprobs: EncodedTensor
    """float32[P]: log probability of the likeliest token after each prefix, at temperature 1."""

    def check(self) -> None:
        """Raise `CodecError` unless the canary is sound."""
        num_tokens, num_prefixes = (
            tensor.shape[0] if len(tensor.shape) == 1 else 0 for tensor in (self.token_ids, self.lengths)
        )
        if not 0 < num_prefixes <= num_tokens <= MAX_CANARY_TOKENS:
            raise CodecError(f"a canary has {num_tokens} tokens and {num_prefixes} prefixes")
        is_sound = self.token_ids.is_vector("int32", num_tokens) and self.lengths.is_vector("int32", num_prefixes)
        if not is_sound or not self.logprobs.is_vector("float32", num_prefixes):
            raise CodecError("the arrays of a canary do not have the types and lengths they should have")
        lengths, logprobs = self.lengths.numpy(), self.logprobs.numpy()
        if lengths.min() < 1 or lengths.max() > num_tokens or self.token_ids.numpy().min() < 0:
            raise CodecError("a canary has a prefix longer than its prompt, or a negative token")
        if not np.isfinite(logprobs).all():
            raise CodecError("a canary has a log probability that is not finite")
