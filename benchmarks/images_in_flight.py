"""What images cost the orchestrator in memory: 256 rollouts in flight, with 1 MB of pixels each, then their batch.

    python -m benchmarks.images_in_flight

Resident memory of a fresh process that plays the orchestrator: real sessions and the real HTTP client, at an engine in
another process that answers nobody before all have asked. `held` is each different image once. Every rollout has a
image of its own (`group_size_1`), or sixteen share one. `benchmarks/multimodal.py` measures the way to the trainer.
"""

import asyncio
import base64
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from aiohttp import web
from PIL import Image

from benchmarks import harness
from chat.tokenizer import Tokenizer
from orchestrator.batches.assembler import to_samples
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.envs.session import SamplingPlan, Session
from orchestrator.values.rollout import Rollout
from transport.wire.codec import build_batch, encode
from transport.wire.generation import GENERATE_PATH, MSGPACK, GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

NUM_ROLLOUTS = 256
SIDE = 296
"""Pixels of an image's side: 1.05 MB as float32 patches of one frame."""
RUN = "bench"


def serve_waiting(num_rollouts: int) -> None:
    """An engine that answers nobody before all have asked; prints its port."""
    arrived, everyone = 0, asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        nonlocal arrived
        asked = msgspec.msgpack.decode(await request.read(), type=GenerateRequest).request_id
        arrived += 1
        if arrived == num_rollouts:
            everyone.set()
        await everyone.wait()
        ids, logprobs = EncodedTensor.of(np.array([5, 2], np.int32)), EncodedTensor.of(-np.ones(2, np.float32))
        spans = (VersionSpan(0, 0, 2),)
        reply = GenerateReply(request_id=asked, token_ids=ids, logprobs=logprobs, finish_reason="stop", versions=spans)
        return web.Response(body=encode(reply), content_type=MSGPACK)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "vocab_size": 1 << 20, "model": "waiting"})

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post(GENERATE_PATH, generate), web.get("/health", health)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


def message(number: int) -> dict[str, object]:
    """A message with image `number`: noise, packed so that its file is small against its patches."""
    values = np.random.default_rng(number).integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


async def measure_memory(url: str, folder: Path, num_rollouts: int, group_size: int) -> dict[str, float]:
    """Peaks over what must be held, with all rollouts in flight, and with their batch."""
    tokenizer = Tokenizer.from_folder(folder)
    engine = HttpEngine(EnginesConfig(urls=[url]))
    await engine.start()
    plans = [SamplingPlan(f"env/{number // group_size}/0#{number}", 0, 1.0, 8) for number in range(num_rollouts)]
    sessions = [Session(engine, tokenizer, plan) for plan in plans]
    before = harness.memory_bytes()
    watch = asyncio.create_task(_peak())
    await asyncio.gather(*(played.complete([message(i // group_size)]) for i, played in enumerate(sessions)))
    watch.cancel()
    in_flight = max(await watch, harness.memory_bytes())
    branches = [played.trajectory.branches() for played in sessions]
    held = sum({id(b.images): b.images.pixel_values.num_bytes for (b,) in branches if b.images}.values())
    rollouts = [Rollout("env", "0", 1.0, each, 1.0, False, {}, (), 0.0) for each in branches]
    samples = [
        sample
        for rollout, plan in zip(rollouts, plans, strict=True)
        for sample in to_samples(
            rollout, advantage=1.0, run_id=RUN, group_id=plan.trajectory_id, trajectory_id=plan.trajectory_id
        )
    ]
    batch = build_batch(RUN, 1, samples)
    with_batch = harness.memory_bytes()
    await engine.close()
    return {
        "held_mb": held / 1e6,
        "in_flight_over_held": (in_flight - before) / held,
        "batch_mb": batch.num_bytes / 1e6,
        "with_batch_over_held": (with_batch - before) / held,
    }


async def _peak() -> int:
    peak = 0
    try:
        while True:
            peak = max(peak, harness.memory_bytes())
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return peak


def memory(num_rollouts: int, group_size: int, folder: Path) -> dict[str, float]:
    """`measure_memory` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.images_in_flight"]
    with subprocess.Popen(
        [*command, "serve", str(num_rollouts)], stdout=subprocess.PIPE, text=True, cwd=harness.ROOT
    ) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            arguments = ["memory", url, str(folder), str(num_rollouts), str(group_size)]
            done = subprocess.run(
                [*command, *arguments], check=True, capture_output=True, text=True, timeout=300, cwd=harness.ROOT
            )
        finally:
            server.kill()
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def make_folder(folder: Path) -> Path:
    """The tiny vision model, for larger images than it was made for."""
    command = [sys.executable, "-m", "tiny_models", "--task", "colour", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=harness.ROOT)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "size": {"shortest_edge": 64, "longest_edge": 2 * SIDE * SIDE}}))
    return folder


def measure() -> dict[str, object]:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        folder = make_folder(Path(directory) / "model")
        memories = {f"group_size_{size}": memory(NUM_ROLLOUTS, size, folder) for size in (1, 16)}
    return {
        "workload": {"rollouts": NUM_ROLLOUTS, "pixel_bytes_per_image": SIDE * SIDE * 3 * 4},
        "memory": memories,
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", num_rollouts]:
            serve_waiting(int(num_rollouts))
        case ["memory", url, folder, num_rollouts, group_size]:
            print(json.dumps(uvloop.run(measure_memory(url, Path(folder), int(num_rollouts), int(group_size)))))
        case _:
            harness.main("images_in_flight", __doc__, measure)
