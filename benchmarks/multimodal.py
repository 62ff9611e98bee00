"""256 samples with 1 MB of pixels each, from the orchestrator's memory to the trainer's tensors, over a real link.

    python -m benchmarks.multimodal

Two processes: one cuts, stores and serves batches as the orchestrator does, this one fetches, checks and merges them as
a trainer does. Times are CPU seconds of both (the machine may be shared), kernel included. `tcp` sends them over
loopback, `ipc` over a Unix socket. They take turns for several rounds. A stage counts with its best batch, and beside
it with its median.

A copy of the pixels reads them in one place and writes them to another, be it by us or by the kernel for us; what the
disk and a network card fetch for themselves is none, nor is a hash.

    cut      encode
    store    encode, from our memory to the page cache
    serve    page cache to the socket
    fetch    socket to the trainer's memory

`memcpy` goes through as many bytes, piece by piece, between buffers that were used before; its turns come between the
batches. "Shipped" are these four stages, samples to samples. `copy_over_memcpy` charges everything else to the copies:
the hashes, the file system, TCP, Python.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import harness
from trainer.images.inputs import merge_images
from trainer.images.samples import check_image_samples
from trainer.images.spec import ImageSpec
from transport.client.client import BatchClient
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer
from transport.wire.codec import build_batch
from transport.wire.sample import EncodedTensor, TrainingSample

RUN = "bench"
NUM_SAMPLES = 256
NUM_ROUNDS, NUM_BATCHES = 3, 6
MICRO_BATCH_SAMPLES = 8
IMAGE_TOKEN, MERGE, PATCH_NUMBERS = 60, 2, 3 * 2 * 14 * 14
GRID = (1, 16, 14)
"""224 patches of 1176 numbers: 1.05 MB in float32, 56 tokens."""
NUM_TEXT_TOKENS = 72
SAMPLE_BYTES = 224 * PATCH_NUMBERS * 4
TOTAL_BYTES = NUM_SAMPLES * SAMPLE_BYTES
STAGES = ("cut", "store", "serve", "fetch", "check_image_samples", "merge")
SHIPPED = ("cut", "store", "serve", "fetch")
COPIES = 5
"""Of the pixels in the stages that ship them."""
WAYS = ("tcp", "ipc")
WAIT_S = 300.0

Seconds = dict[str, list[float]]
"""CPU seconds of every batch, by stage."""


@dataclass(frozen=True)
class Stored:
    """What the orchestrator's process says in the end."""

    seconds: Seconds
    memory_over_data: float


def make_sample(number: int) -> TrainingSample:
    rng = np.random.default_rng(number)
    num_image_tokens = GRID[1] * GRID[2] // MERGE**2
    is_image = np.arange(num_image_tokens + NUM_TEXT_TOKENS) < num_image_tokens
    is_trained = np.arange(len(is_image)) >= len(is_image) - NUM_TEXT_TOKENS // 2
    return TrainingSample(
        run_id=RUN,
        env_name="env",
        example_id=str(number),
        group_id=f"env/{number // 8}/0",
        trajectory_id=f"env/{number // 8}/0#{number % 8}",
        token_ids=EncodedTensor.of(np.where(is_image, IMAGE_TOKEN, 1).astype(np.int32)),
        loss_mask=EncodedTensor.of(is_trained),
        logprobs=EncodedTensor.of(np.where(is_trained, -1.0, 0.0).astype(np.float32)),
        advantages=0.5,
        temperature=1.0,
        reward=1.0,
        versions=(),
        mm_kwargs={
            "pixel_values": EncodedTensor.of(rng.random((GRID[1] * GRID[2], PATCH_NUMBERS), dtype=np.float32)),
            "image_grid_thw": EncodedTensor.of(np.array([GRID], dtype=np.int64)),
        },
        mm_token_type_ids=EncodedTensor.of(is_image.astype(np.uint8)),
    )


class Memcpy:
    """Copies as many bytes as a batch has, in pieces of one sample."""

    def __init__(self) -> None:
        self._source = np.ones((NUM_SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self.copy()

    def copy(self) -> None:
        for row in range(NUM_SAMPLES):
            self._target[row] = self._source[row]


# --- the orchestrator's process -----------------------------------------------------------------------------------


def orchestrate(directory: Path, endpoint: str, pipe: Connection) -> None:
    """Hold the samples, cut and store them as several batches, serve them until told to stop."""
    before = harness.memory_bytes()
    samples = [make_sample(number) for number in range(NUM_SAMPLES)]
    outbox = Outbox(directory, RUN)
    seconds: Seconds = {"cut": [], "store": []}
    for step in range(1, NUM_BATCHES + 1):
        started = time.process_time()
        batch = build_batch(RUN, step, samples)
        seconds["cut"].append(time.process_time() - started)
        seconds["store"].append(harness.best_s(lambda batch=batch: outbox.put(batch), repeats=1))
    uvloop.run(serve_until_told(outbox, endpoint, pipe))
    pipe.send(Stored(seconds, (harness.memory_bytes("VmHWM") - before) / TOTAL_BYTES))


async def serve_until_told(outbox: Outbox, endpoint: str, pipe: Connection) -> None:
    """Says where it serves; then tells its CPU seconds whenever it is asked for them, until it is asked for the end."""
    ended = asyncio.Event()

    def answer() -> None:
        if pipe.recv() == "end":
            ended.set()
        else:
            pipe.send(time.process_time())

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    async with BatchServer(endpoint, outbox) as server:
        serving = asyncio.create_task(server.serve())
        pipe.send(server.endpoint)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        serving.cancel()
        await asyncio.wait([serving])
    asyncio.get_running_loop().remove_reader(pipe.fileno())


# --- the trainer's process ----------------------------------------------------------------------------------------


def train(endpoint: str, pipe: Connection, memcpy: Memcpy) -> tuple[Seconds, list[float]]:
    """(seconds of serving, of our own stages and of memcpy, wall seconds of each fetch)."""
    spec = ImageSpec(IMAGE_TOKEN, MERGE, PATCH_NUMBERS)
    seconds: Seconds = {stage: [] for stage in ("serve", "fetch", "check_image_samples", "merge", "memcpy")}
    walls = []
    with BatchClient(endpoint, RUN, peer_timeout_s=60.0) as client:
        client.hello()
        for step in range(1, NUM_BATCHES + 1):
            served, marks, wall = _served_s(pipe), [time.process_time()], time.perf_counter()
            samples = client.samples(client.manifest(step), range(NUM_SAMPLES))
            walls.append(time.perf_counter() - wall)
            marks.append(time.process_time())
            checked = check_image_samples(dict(enumerate(samples)), spec, seq_len=1024)
            marks.append(time.process_time())
            assert not checked.refused, checked.refused
            for first in range(0, NUM_SAMPLES, MICRO_BATCH_SAMPLES):
                merge_images([checked.samples[first + place] for place in range(MICRO_BATCH_SAMPLES)], spec, 0)
            marks.append(time.process_time())
            memcpy.copy()
            marks.append(time.process_time())
            spent = [_served_s(pipe) - served, *np.diff(marks).tolist()]
            for stage, stage_s in zip(seconds, spent, strict=True):
                seconds[stage].append(stage_s)
    return seconds, walls


def _served_s(pipe: Connection) -> float:
    pipe.send("cpu")
    spent: float = _answer(pipe)
    return spent


def run_both(way: str, memcpy: Memcpy) -> tuple[Seconds, list[float], float]:
    """(seconds of all stages and of memcpy, wall seconds of each fetch, memory of the orchestrator over its data)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/link" if way == "ipc" else "tcp://127.0.0.1:0"
        process = context.Process(target=orchestrate, args=(Path(directory), endpoint, theirs), daemon=True)
        process.start()
        try:
            seconds, walls = train(_answer(ours), ours, memcpy)
            ours.send("end")
            stored: Stored = _answer(ours)
        finally:
            process.kill()
            process.join()
    return stored.seconds | seconds, walls, stored.memory_over_data


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise SystemExit("the orchestrator's process does not answer")
    return pipe.recv()


def shipped(seconds: Seconds) -> dict[str, float]:
    """All stages that ship the pixels, together."""
    best_s, median_s = (sum(kind(seconds[stage]) for stage in SHIPPED) for kind in (min, statistics.median))
    return {
        "cpu_s": best_s,
        "cpu_s_median": median_s,
        "copies": COPIES,
        "copy_over_memcpy": COPIES * min(seconds["memcpy"]) / best_s,
        "copy_over_memcpy_median": COPIES * statistics.median(seconds["memcpy"]) / median_s,
    }


def measure() -> dict[str, object]:
    """Every way, in turns."""
    memcpy = Memcpy()
    seconds: dict[str, Seconds] = {way: defaultdict(list) for way in WAYS}
    walls, memory = ({way: list[float]() for way in WAYS} for _ in range(2))
    for _ in range(NUM_ROUNDS):
        for way in WAYS:
            new_seconds, new_walls, new_memory = run_both(way, memcpy)
            walls[way] += new_walls
            memory[way].append(new_memory)
            for stage, values in new_seconds.items():
                seconds[way][stage] += values
    workload = {"samples": NUM_SAMPLES, "pixel_bytes": SAMPLE_BYTES, "batches": NUM_BATCHES, "rounds": NUM_ROUNDS}
    return {"workload": workload} | {
        way: {
            "memcpy_gb_s": TOTAL_BYTES / min(seconds[way]["memcpy"]) / 1e9,
            "stages_cpu_s": {stage: min(seconds[way][stage]) for stage in STAGES},
            "shipped": shipped(seconds[way]) | {"fetch_wall_s": min(walls[way])},
            "orchestrator_memory_over_data": max(memory[way]),
        }
        for way in WAYS
    }


if __name__ == "__main__":
    harness.main("multimodal", __doc__, measure)
