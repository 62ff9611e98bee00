"""What the files in `tests/golden/schema_3/` hold: one of every wire type of SCHEMA_VERSION 3, as plain values.

Never change its files: a wire type that changes needs a new SCHEMA_VERSION, this module under its number, and a folder
beside the old ones, which stay. `python -m tests.golden.schema_3` writes files that do not exist yet.
"""

from pathlib import Path

import msgspec
import numpy as np

from transport.outbox.outbox import file_chunks
from transport.wire.codec import EncodedBatch, build_batch, encode, int32
from transport.wire.messages import (
    Ack,
    Broadcast,
    Bye,
    Committed,
    EndOfRun,
    Failure,
    GetBroadcast,
    GetManifest,
    GetSamples,
    GetWeightBytes,
    GetWeights,
    Hello,
    Manifest,
    NotReady,
    Ping,
    Pong,
    Refusal,
    Samples,
    Stranger,
    Trained,
    WeightBytes,
    Weights,
    WeightsPublished,
    Welcome,
)
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan
from transport.wire.weights import BroadcastGroup, ShardEntry, TensorEntry, WeightManifest, WeightOffer, WeightRange

FOLDER = Path(__file__).parent / "schema_3"
BATCH_NAME = "batch.batch"


def plain_sample() -> TrainingSample:
    """Only what every sample has."""
    return TrainingSample(
        run_id="golden",
        env_name="reverse-text",
        example_id="17",
        group_id="reverse-text/17/0",
        trajectory_id="reverse-text/17/0#3",
        token_ids=EncodedTensor.of(np.arange(6, dtype=np.int32)),
        loss_mask=EncodedTensor.of(np.arange(6) >= 2),
        logprobs=EncodedTensor.of(np.arange(6, dtype=np.float32) / -4),
        advantages=-0.5,
        temperature=0.75,
        reward=1.0,
        versions=(VersionSpan(4, 2, 5), VersionSpan(5, 5, 6)),
    )


def full_sample() -> TrainingSample:
    """Every field, an image too."""
    stream = EncodedTensor.of(np.linspace(0, 1, 6).astype(np.float32))
    return msgspec.structs.replace(
        plain_sample(),
        env_name="bilder",
        example_id="größe",
        group_id="bilder/größe/1",
        trajectory_id="bilder/größe/1#0",
        step_index=2,
        advantages=stream,
        versions=(),
        ref_logprobs=stream,
        rl_weights=stream,
        ce_weights=stream,
        ref_kl_weights=stream,
        mm_kwargs={
            "pixel_values": EncodedTensor("bfloat16", (2, 2), memoryview(bytes(range(8)))),
            "image_grid_thw": EncodedTensor.of(np.array([[1, 2, 2]], dtype=np.int64)),
        },
        mm_token_type_ids=EncodedTensor.of(np.array([0, 1, 1, 1, 1, 0], dtype=np.uint8)),
    )


def batch() -> EncodedBatch:
    """Batch 12 of both."""
    return build_batch("golden", 12, [plain_sample(), full_sample()])


def offer() -> WeightOffer:
    """Two ranks that share one tensor. No publish has both files and ranges, but the types allow it."""
    return WeightOffer(
        manifest=WeightManifest(
            run_id="golden",
            version=12,
            tensors=(TensorEntry(name="a.weight", dtype="float32", shape=(3, 2), shard="a.safetensors", hash="cd"),),
            shards=(ShardEntry(file="a.safetensors", num_bytes=99),),
            digest="ab",
        ),
        servers=("tcp://10.0.0.1:29700", "tcp://10.0.0.1:29701"),
        ranges=(WeightRange("a.weight", 0, 16, 0), WeightRange("a.weight", 16, 8, 1)),
    )


def group() -> BroadcastGroup:
    """A process group that waits for an engine."""
    return BroadcastGroup(host="10.0.0.1", port=4711, backend="gloo", chunk_bytes=64, timeout_s=60.0)


def messages() -> dict[str, msgspec.Struct]:
    """One of each message, by its tag."""
    return {
        "hello": Hello(seq=1, schema_version=3, run_id="golden", rank=1, world_size=4, last_committed=11),
        "get_manifest": GetManifest(seq=2, step=12),
        "get_samples": GetSamples(seq=3, step=12, indices=int32([1, 0])),
        "trained": Trained(seq=4, step=12),
        "committed": Committed(seq=5, step=12),
        "weights_published": WeightsPublished(seq=6, version=12, location="/w/v12/manifest.json", digest="ab"),
        "get_weights": GetWeights(seq=9, version=12),
        "get_weight_bytes": GetWeightBytes(seq=10, version=12, offset=8, num_bytes=16),
        "get_broadcast": GetBroadcast(seq=11, version=12),
        "ping": Ping(seq=7),
        "bye": Bye(seq=8, reason="done"),
        "welcome": Welcome(seq=1, schema_version=3),
        "refusal": Refusal(seq=1, schema_version=3, reason="run 'a', this server runs 'b'"),
        "stranger": Stranger(seq=2),
        "manifest": Manifest(seq=2, manifest=batch().manifest),
        "not_ready": NotReady(seq=2, waiting_for="rollouts"),
        "end_of_run": EndOfRun(seq=2),
        "samples": Samples(seq=3),
        "weights": Weights(seq=9, offer=offer()),
        "weight_bytes": WeightBytes(seq=10, hash=2**63),
        "broadcast": Broadcast(seq=11, group=group()),
        "ack": Ack(seq=4),
        "pong": Pong(seq=7),
        "failure": Failure(seq=3, reason="batch 3 was retired"),
    }


def files() -> dict[str, bytes]:
    """Every golden file and its bytes, as this code encodes them."""
    encoded = {f"{name}.msgpack": encode(message) for name, message in messages().items()}
    return encoded | {BATCH_NAME: b"".join(map(bytes, file_chunks(batch())))}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in files().items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)
            print("wrote", FOLDER / name)


if __name__ == "__main__":
    main()
