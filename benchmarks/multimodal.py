"""256 samples with 1 MB of pixels each, from the orchestrator's memory to the trainer's tensors, over a real link.

    python -m benchmarks.multimodal [--out benchmarks/results/multimodal.json]

Two processes: one cuts, stores and serves batches as the orchestrator does, this one fetches, checks and merges them as
a trainer does. Times are CPU seconds (the machine may be shared), kernel included, best of several batches. `tcp` is
loopback, `ipc` a Unix socket.

Every time that the pixels are gone through is counted, as a copy or as a read:

    cut      copy: encode                         read: hash
    store    copy: encode, write to the file
    serve    copy: read from the file, send       read: hash
    fetch    copy: receive                        read: hash
    take in                                       read: finite?
    merge    copy: into the tensor of a micro batch

`memcpy` is between two buffers that were used before; `memcpy_fresh` is into memory that is kept, as every copy must be
that somebody holds on to, so that the kernel has to find pages for it. "Shipped" are the first four stages, samples
to samples. `copy_over_memcpy` credits copies alone and charges the reads to them; `pass_over_memcpy` credits both.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from transport.batch import build_batch
from transport.client import BatchClient
from transport.outbox import Outbox
from transport.sample import TrainingSample
from transport.server import BatchServer
from transport.tensor import EncodedTensor

RUN = "bench"
NUM_SAMPLES = 256
NUM_BATCHES = 4
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
    "serve": (2, 1),
    "fetch": (1, 1),
    "take_in": (0, 1),
    "merge": (1, 0),
}
"""(copies, reads) of the pixels in each stage."""
SHIPPED = ("cut", "store", "serve", "fetch")
WAIT_S = 300.0


@dataclass(frozen=True)
class Served:
    """What the orchestrator's process says in the end: best CPU seconds by stage, and its memory in bytes."""

    seconds: dict[str, float]
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


def memcpy_gb_s() -> dict[str, float]:
    """Bytes copied per second, in pieces of one sample."""
    source = np.ones((NUM_SAMPLES, SAMPLE_BYTES), dtype=np.uint8)
    target = np.zeros_like(source)

    def warm() -> None:
        for row in range(NUM_SAMPLES):
            target[row] = source[row]

    def fresh() -> list[bytes]:
        return [source[row].tobytes() for row in range(NUM_SAMPLES)]

    warm()
    return {
        "memcpy": TOTAL_BYTES / min(cpu_s(warm) for _ in range(7)) / 1e9,
        "memcpy_fresh": TOTAL_BYTES / min(cpu_s(fresh) for _ in range(3)) / 1e9,
    }


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
    cut, store = [], []
    for step in range(1, NUM_BATCHES + 1):
        started = time.process_time()
        batch = build_batch(RUN, step, samples)
        cut.append(time.process_time() - started)
        store.append(cpu_s(lambda batch=batch: outbox.put(batch)))  # type: ignore[misc]
    serve = uvloop.run(serve_until_told(outbox, endpoint, pipe)) / NUM_BATCHES
    seconds = {"cut": min(cut), "store": min(store), "serve": serve}
    pipe.send(Served(seconds, memory_bytes("VmHWM"), before))


async def serve_until_told(outbox: Outbox, endpoint: str, pipe: Connection) -> float:
    """CPU seconds of serving."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)
    async with BatchServer(endpoint, outbox) as server:
        serving = asyncio.create_task(server.serve())
        pipe.send(server.endpoint)
        started = time.process_time()
        async with asyncio.timeout(WAIT_S):
            await told.wait()
        spent = time.process_time() - started
        serving.cancel()
        await asyncio.wait([serving])
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    return spent


# --- the trainer's process ----------------------------------------------------------------------------------------


def train(endpoint: str) -> tuple[dict[str, float], float]:
    """(best CPU seconds by stage, best wall seconds of a fetch)."""
    from trainer.images.inputs import merge_images
    from trainer.images.intake import take_in
    from trainer.images.spec import ImageSpec

    spec = ImageSpec(IMAGE_TOKEN, MERGE, PATCH_NUMBERS)
    seconds: dict[str, list[float]] = {"fetch": [], "take_in": [], "merge": []}
    walls = []
    with BatchClient(endpoint, RUN, peer_timeout_s=60.0) as client:
        client.hello()
        for step in range(1, NUM_BATCHES + 1):
            marks, wall = [time.process_time()], time.perf_counter()
            samples = client.samples(step, range(NUM_SAMPLES))
            walls.append(time.perf_counter() - wall)
            marks.append(time.process_time())
            intake = take_in(dict(enumerate(samples)), spec, seq_len=1024)
            marks.append(time.process_time())
            assert not intake.refused, intake.refused
            for first in range(0, NUM_SAMPLES, MICRO_BATCH_SAMPLES):
                merge_images([intake.samples[first + place] for place in range(MICRO_BATCH_SAMPLES)], spec, 0)
            marks.append(time.process_time())
            for stage, spent in zip(seconds, np.diff(marks).tolist(), strict=True):
                seconds[stage].append(spent)
    return {stage: min(values) for stage, values in seconds.items()}, min(walls)


def run_both(transport: str) -> tuple[dict[str, float], float, Served]:
    """(CPU seconds by stage, wall seconds of a fetch, what the orchestrator's process said)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as directory:
        endpoint = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{directory}/link"
        process = context.Process(target=orchestrate, args=(Path(directory) / "outbox", endpoint, theirs), daemon=True)
        process.start()
        try:
            seconds, wall_s = train(_answer(ours))
            ours.send("report")
            served: Served = _answer(ours)
        finally:
            process.kill()
            process.join()
    return served.seconds | seconds, wall_s, served


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(WAIT_S):
        raise SystemExit("the orchestrator's process does not answer")
    return pipe.recv()


def stage_row(stage: str, seconds: float, memcpy: dict[str, float]) -> dict[str, float]:
    copies, reads = PASSES[stage]
    gb = TOTAL_BYTES / 1e9
    return {
        "cpu_s": seconds,
        "copies": copies,
        "reads": reads,
        "gb_s_per_pass": (copies + reads) * gb / seconds,
        "pass_over_memcpy": (copies + reads) * gb / seconds / memcpy["memcpy"],
        "pass_over_memcpy_fresh": (copies + reads) * gb / seconds / memcpy["memcpy_fresh"],
    }


def measure(transport: str, memcpy: dict[str, float]) -> dict[str, object]:
    """One variant."""
    seconds, wall_s, served = run_both(transport)
    shipped_s = sum(seconds[stage] for stage in SHIPPED)
    copies, reads = (sum(PASSES[stage][kind] for stage in SHIPPED) for kind in (0, 1))
    copy_gb_s, pass_gb_s = (count * TOTAL_BYTES / 1e9 / shipped_s for count in (copies, copies + reads))
    return {
        "stages": {stage: stage_row(stage, seconds[stage], memcpy) for stage in PASSES},
        "shipped": {
            "cpu_s": shipped_s,
            "copies": copies,
            "reads": reads,
            "fetch_wall_s": wall_s,
            "copy_over_memcpy": copy_gb_s / memcpy["memcpy"],
            "pass_over_memcpy": pass_gb_s / memcpy["memcpy"],
            "copy_over_memcpy_fresh": copy_gb_s / memcpy["memcpy_fresh"],
        },
        "orchestrator_memory_over_data": (served.peak_bytes - served.before_bytes) / TOTAL_BYTES,
    }


def run() -> dict[str, object]:
    load = os.getloadavg()[0]
    memcpy = memcpy_gb_s()
    variants = {transport: measure(transport, memcpy) for transport in ("tcp", "ipc")}
    return {
        "workload": {"samples": NUM_SAMPLES, "pixel_bytes": SAMPLE_BYTES, "batches": NUM_BATCHES},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": load},
        "gb_s": memcpy,
        "targets": {"copy_over_memcpy": {"at_least": 0.5}, "orchestrator_memory_over_data": {"at_most": 1.3}},
        **variants,
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
