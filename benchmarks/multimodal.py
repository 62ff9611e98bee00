"""256 samples with 1 MB of pixels each, from the orchestrator's memory to the trainer's tensors, over a real link.

    python -m benchmarks.multimodal [--out benchmarks/results/multimodal.json]

Two processes: one cuts, stores and serves batches as the orchestrator does, this one fetches, checks and merges them as
a trainer does. Times are CPU seconds of both (the machine may be shared), kernel included. `tcp` sends them over
loopback, `ipc` over a Unix socket. They take turns for several rounds. A stage counts with its best batch, and beside
it with its median.

Every time that the pixels are gone through is counted. A copy reads them in one place and writes them to another, be it
by us or by the kernel for us; what the disk and a network card fetch for themselves is none. A read writes nothing.

    cut      copy: encode                                        read: hash
    store    copy: encode, from our memory to the page cache
    serve    copy: page cache to the socket                      read: hash
    fetch    copy: socket to the trainer's memory                read: hash
    take in                                                      read: finite?
    merge    copy: into the tensor of a micro batch

`memcpy` goes through as many bytes, piece by piece, between buffers that were used before; its turns come between the
batches. `memcpy_fresh` is into memory that is kept, so that the kernel has to find pages for it. "Shipped" are the
first four stages, samples to samples. `copy_over_memcpy` credits copies alone and charges everything else to them: the
hashes, the file system, TCP, Python. `pass_over_memcpy` credits the reads, too. `plain_calls` is what system calls
alone reach by the same measure over a socket (benchmarks/plain_calls.py).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import plain_calls
from trainer.kept_memory import keep_freed_memory
from transport.batch import build_batch
from transport.client import BatchClient
from transport.outbox import Outbox
from transport.sample import TrainingSample
from transport.server import BatchServer
from transport.tensor import EncodedTensor

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
PASSES = {
    "cut": (1, 1),
    "store": (2, 0),
    "serve": (1, 1),
    "fetch": (1, 1),
    "take_in": (0, 1),
    "merge": (1, 0),
}
"""(copies, reads) of the pixels in each stage."""
SHIPPED = ("cut", "store", "serve", "fetch")
WAIT_S = 300.0


Seconds = dict[str, list[float]]
"""CPU seconds of every batch, by stage."""


@dataclass(frozen=True)
class Stored:
    """What the orchestrator's process says in the end."""

    seconds: Seconds
    peak_bytes: int
    before_bytes: int


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


def cpu_s(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


class Memcpy:
    """Copies as many bytes as a batch has, in pieces of one sample."""

    def __init__(self) -> None:
        self._source = np.ones((NUM_SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self.warm()

    def warm(self) -> None:
        for row in range(NUM_SAMPLES):
            self._target[row] = self._source[row]

    def fresh(self) -> list[bytes]:
        return [self._source[row].tobytes() for row in range(NUM_SAMPLES)]


# --- the orchestrator's process -----------------------------------------------------------------------------------


def memory_bytes(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process. (getrusage would count what the parent had when it forked.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def orchestrate(directory: Path, endpoint: str, pipe: Connection) -> None:
    """Hold the samples, cut and store them as several batches, serve them until told to stop."""
    before = memory_bytes("VmRSS")
    samples = [make_sample(number) for number in range(NUM_SAMPLES)]
    outbox = Outbox(directory, RUN)
    seconds: Seconds = {"cut": [], "store": []}
    for step in range(1, NUM_BATCHES + 1):
        started = time.process_time()
        batch = build_batch(RUN, step, samples)
        seconds["cut"].append(time.process_time() - started)
        seconds["store"].append(cpu_s(lambda batch=batch: outbox.put(batch)))  # type: ignore[misc]
    uvloop.run(serve_until_told(outbox, endpoint, pipe))
    pipe.send(Stored(seconds, memory_bytes("VmHWM"), before))


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
    from trainer.images.inputs import merge_images
    from trainer.images.intake import take_in
    from trainer.images.spec import ImageSpec

    spec = ImageSpec(IMAGE_TOKEN, MERGE, PATCH_NUMBERS)
    seconds: Seconds = {stage: [] for stage in ("serve", "fetch", "take_in", "merge", "memcpy")}
    walls = []
    with BatchClient(endpoint, RUN, peer_timeout_s=60.0) as client:
        client.hello()
        for step in range(1, NUM_BATCHES + 1):
            served, marks, wall = _served_s(pipe), [time.process_time()], time.perf_counter()
            samples = client.samples(client.manifest(step), range(NUM_SAMPLES))
            walls.append(time.perf_counter() - wall)
            marks.append(time.process_time())
            intake = take_in(dict(enumerate(samples)), spec, seq_len=1024)
            marks.append(time.process_time())
            assert not intake.refused, intake.refused
            for first in range(0, NUM_SAMPLES, MICRO_BATCH_SAMPLES):
                merge_images([intake.samples[first + place] for place in range(MICRO_BATCH_SAMPLES)], spec, 0)
            marks.append(time.process_time())
            memcpy.warm()
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
    return stored.seconds | seconds, walls, (stored.peak_bytes - stored.before_bytes) / TOTAL_BYTES


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise SystemExit("the orchestrator's process does not answer")
    return pipe.recv()


def stage_row(stage: str, seconds: Seconds) -> dict[str, float]:
    copies, reads = PASSES[stage]
    best_s = min(seconds[stage])
    return {
        "cpu_s": best_s,
        "cpu_s_median": statistics.median(seconds[stage]),
        "copies": copies,
        "reads": reads,
        "gb_s_per_pass": (copies + reads) * TOTAL_BYTES / 1e9 / best_s,
        "pass_over_memcpy": (copies + reads) * min(seconds["memcpy"]) / best_s,
    }


def shipped_row(seconds: Seconds, fresh_s: float) -> dict[str, float]:
    """All four stages together."""
    best_s, median_s = (sum(kind(seconds[stage]) for stage in SHIPPED) for kind in (min, statistics.median))
    copies, reads = (sum(PASSES[stage][kind] for stage in SHIPPED) for kind in (0, 1))
    memcpy_s = min(seconds["memcpy"])
    return {
        "cpu_s": best_s,
        "cpu_s_median": median_s,
        "copies": copies,
        "reads": reads,
        "copy_over_memcpy": copies * memcpy_s / best_s,
        "copy_over_memcpy_median": copies * statistics.median(seconds["memcpy"]) / median_s,
        "pass_over_memcpy": (copies + reads) * memcpy_s / best_s,
        "copy_over_memcpy_fresh": copies * fresh_s / best_s,
    }


def plain_row(plain_s: list[float], memcpy_s: list[float]) -> dict[str, float]:
    return {
        "cpu_s": min(plain_s),
        "cpu_s_median": statistics.median(plain_s),
        "copies": plain_calls.COPIES,
        "copy_over_memcpy": plain_calls.COPIES * min(memcpy_s) / min(plain_s),
        "copy_over_memcpy_median": plain_calls.COPIES * statistics.median(memcpy_s) / statistics.median(plain_s),
    }


def measure(ways: Sequence[str], memcpy: Memcpy, fresh_s: float) -> dict[str, dict[str, object]]:
    """Every way, in turns."""
    seconds: dict[str, Seconds] = {way: defaultdict(list) for way in ways}
    walls, memory, plain = ({way: list[float]() for way in ways} for _ in range(3))
    for _ in range(NUM_ROUNDS):
        for way in ways:
            new_seconds, new_walls, new_memory = run_both(way, memcpy)
            walls[way] += new_walls
            memory[way].append(new_memory)
            plain[way] += plain_calls.ship(way, NUM_SAMPLES, SAMPLE_BYTES)
            for stage, values in new_seconds.items():
                seconds[way][stage] += values
    return {
        way: {
            "memcpy_gb_s": TOTAL_BYTES / min(seconds[way]["memcpy"]) / 1e9,
            "stages": {stage: stage_row(stage, seconds[way]) for stage in PASSES},
            "shipped": shipped_row(seconds[way], fresh_s) | {"fetch_wall_s": min(walls[way])},
            "orchestrator_memory_over_data": max(memory[way]),
            "plain_calls": plain_row(plain[way], seconds[way]["memcpy"]),
        }
        for way in ways
    }


def run() -> dict[str, object]:
    load = os.getloadavg()[0]
    memcpy = Memcpy()
    fresh_s = min(cpu_s(memcpy.fresh) for _ in range(3))
    keep_freed_memory(on_gpu=False)
    return {
        "workload": {
            "samples": NUM_SAMPLES,
            "pixel_bytes": SAMPLE_BYTES,
            "batches": NUM_BATCHES,
            "rounds": NUM_ROUNDS,
        },
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": load},
        "memcpy_fresh_gb_s": TOTAL_BYTES / fresh_s / 1e9,
        "targets": {"copy_over_memcpy": {"at_least": 0.5}, "orchestrator_memory_over_data": {"at_most": 1.3}},
        **measure(("tcp", "ipc"), memcpy, fresh_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "multimodal.json")
    options = parser.parse_args()
    results = run()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
