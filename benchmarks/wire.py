"""Sample -> wire -> tensor, the link, and what durability costs.

    python -m benchmarks.wire

Codec figures are CPU seconds of one core (the machine may be shared), best of several repeats, with every check and
hash that production does; "tensor" is one packed tensor per stream and micro batch. They come for the same number of
tokens in samples of several lengths: the fixed cost of a sample shows. Link figures are wall time of two real processes
over loopback TCP, without and with CURVE.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop

from benchmarks import harness
from transport.client.client import BatchClient
from transport.outbox.outbox import Outbox
from transport.security.keys import CurveKeys, make_keys
from transport.server.server import BatchServer
from transport.wire.codec import EncodedBatch, build_batch, decode_rows
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan

RUN = "bench"
NUM_SAMPLES, NUM_TOKENS = 128, 4096
TOKENS = NUM_SAMPLES * NUM_TOKENS
MICRO_BATCH_SAMPLES = 4
REPEATS = 70
NUM_PINGS = 300


def make_samples(num_samples: int = NUM_SAMPLES, num_tokens: int = NUM_TOKENS) -> list[TrainingSample]:
    """Text, three quarters of it trained."""
    random = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return [
        TrainingSample(
            run_id=RUN,
            env_name="env",
            example_id=str(number),
            group_id=f"env/{number // 8}/0",
            trajectory_id=f"env/{number // 8}/0#{number % 8}",
            token_ids=EncodedTensor.of(random.integers(0, 150_000, num_tokens, dtype=np.int32)),
            loss_mask=EncodedTensor.of(mask),
            logprobs=EncodedTensor.of(-random.random(num_tokens, dtype=np.float32)),
            advantages=0.5,
            temperature=1.0,
            reward=1.0,
            versions=(VersionSpan(0, num_tokens // 4, num_tokens),),
        )
        for number in range(num_samples)
    ]


def pack(samples: list[TrainingSample]) -> list[list[torch.Tensor]]:
    """As the trainer packs: one tensor per stream and micro batch."""
    arrays = [(s.token_ids.numpy(), s.loss_mask.numpy(), s.logprobs.numpy()) for s in samples]
    packed = []
    for first in range(0, len(arrays), MICRO_BATCH_SAMPLES):
        streams = zip(*arrays[first : first + MICRO_BATCH_SAMPLES], strict=True)
        packed.append([torch.from_numpy(np.concatenate(parts)) for parts in streams])
    return packed


def measure_codec(num_tokens: int) -> dict[str, float]:
    """`TOKENS` in samples of `num_tokens`."""
    samples = make_samples(TOKENS // num_tokens, num_tokens)
    batch, rows = build_batch(RUN, 1, samples), range(len(samples))
    encode_s = harness.best_s(lambda: build_batch(RUN, 1, samples), REPEATS)
    decode_s = harness.best_s(lambda: pack(decode_rows(batch.manifest, rows, batch.frames)), REPEATS)
    return {
        "encode_mtok_s": TOKENS / encode_s / 1e6,
        "decode_to_tensor_mtok_s": TOKENS / decode_s / 1e6,
        "sample_wire_tensor_mtok_s": TOKENS / (encode_s + decode_s) / 1e6,
        "bytes_per_token": batch.num_bytes / TOKENS,
    }


def serve(directory: Path, keys: CurveKeys | None, ready: Connection) -> None:
    """A batch server; sends its endpoint."""

    async def run() -> None:
        async with BatchServer("tcp://127.0.0.1:0", Outbox(directory, RUN), keys=keys) as server:
            ready.send(server.endpoint)
            await server.serve()

    uvloop.run(run())


@contextmanager
def served(batch: EncodedBatch, keys: CurveKeys | None) -> Iterator[str]:
    """The endpoint of a server process that has the batch."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        Outbox(Path(directory), RUN).put(batch)
        process = spawn.Process(target=serve, args=(Path(directory), keys, theirs), daemon=True)
        process.start()
        try:
            if not ours.poll(30):
                raise SystemExit("the server process did not start")
            yield ours.recv()
        finally:
            process.kill()
            process.join()


def measure_link(batch: EncodedBatch, keys: Path | None) -> dict[str, float]:
    """The whole batch, and one sample at a time."""
    own, theirs = (CurveKeys.for_client(keys), CurveKeys.for_server(keys)) if keys else (None, None)
    with served(batch, theirs) as endpoint, BatchClient(endpoint, RUN, keys=own) as client:
        client.hello()
        client.samples(batch.manifest, range(NUM_SAMPLES))
        fetch_s = harness.best_s(lambda: client.samples(batch.manifest, range(NUM_SAMPLES)), 10, time.perf_counter)
        pings_s = harness.best_s(
            lambda: [client.samples(batch.manifest, [0]) for _ in range(NUM_PINGS)], repeats=3, clock=time.perf_counter
        )
    return {
        "mb_s": batch.num_bytes / fetch_s / 1e6,
        "mtok_s": TOKENS / fetch_s / 1e6,
        "round_trip_us": pings_s / NUM_PINGS * 1e6,
    }


def measure_outbox(batch: EncodedBatch) -> dict[str, float]:
    """What it takes to make one batch durable."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        outbox = Outbox(Path(directory), RUN)
        manifests = [msgspec.structs.replace(batch.manifest, step=step) for step in range(1, 11)]
        times = [
            harness.best_s(lambda m=m: outbox.put(EncodedBatch(m, batch.frames)), 1, time.perf_counter)
            for m in manifests
        ]
    return {"put_ms_median": float(np.median(times)) * 1e3, "batch_mb": batch.num_bytes / 1e6}


def measure() -> dict[str, object]:
    """All figures."""
    torch.set_num_threads(1)
    batch = build_batch(RUN, 1, make_samples())
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        make_keys(keys)
        links = {"tandem": measure_link(batch, None), "tandem_curve": measure_link(batch, keys)}
    return {
        "workload": {"samples": NUM_SAMPLES, "tokens_per_sample": NUM_TOKENS},
        "by_tokens_per_sample": {str(length): measure_codec(length) for length in (512, 1024, 2048, NUM_TOKENS)},
        "links": links,
        "outbox": measure_outbox(batch),
    }


if __name__ == "__main__":
    harness.main("wire", __doc__, measure)
