"""How many rollouts one core of the orchestrator carries: in flight, per second, with what loop lag and memory.

    python -m benchmarks.scheduler [--in-flight 10000] [--steps 12] [--rate 3500]

The real `Orchestrator` (scheduler, groups, advantages, batcher, outbox with fsync, batch server) on one core, with a
scripted engine and an environment in this process, and a fake trainer in another that fetches every batch. All
`--in-flight` slots are full when the clock starts. Two runs: the engine offers `--rate` answers a second; and it
answers all that wait at once, again and again, which is the worst that can happen to the lag of the loop.

The machine may be shared, so each figure comes twice: by the wall clock, and by CPU time of the process (all threads).
`lag_cpu` of a probe is at most the CPU time that the process used while the probe waited: what the lag would be with
the core to itself.
"""

import asyncio
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop
from loguru import logger

from benchmarks import harness
from benchmarks.fakes import PROMPT_TOKENS, FakeEnv
from orchestrator.cli import SWITCH_INTERVAL_S
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.protocol import check_reply
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.orchestrator import Orchestrator, open_outbox
from runtime.health.health import Health
from runtime.metrics.metric_log import MetricLog
from runtime.run_dir.run_dir import RunDir
from transport.server.server import BatchServer
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

GROUP_SIZE, BATCH_SIZE, MAX_STALENESS = 8, 4096, 4
VOCAB_SIZE, MAX_TOKENS = 32_000, 256
TICK_S = 0.005
SLICE_S = 0.004
WARM_UP_STEPS = 1
DRAIN_STEPS = 5
"""Last batches that are not timed: for these nothing new is dispatched."""
DEADLINE_S = 600.0


@dataclass
class Probe:
    """Lag of the loop, sampled every `TICK_S`."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_S)
            lag = max(0.0, time.perf_counter() - wall - TICK_S)
            self.wall_s.append(lag)
            self.cpu_s.append(min(lag, time.process_time() - cpu))


class PacedEngine(ScriptedEngine):
    """Ready-made answers in random order: all that wait at once (`rate` 0), or `rate` a second in slices of `SLICE_S`.

    A slice that comes late, because the machine is busy elsewhere, is not made up for: time is stretched for the engine
    as it is for the orchestrator. Answers are checked like those of a real engine.
    """

    def __init__(self, rate: float) -> None:
        super().__init__(VOCAB_SIZE, 0)
        rng = np.random.default_rng(0)
        self.waiting: list[asyncio.Future[None]] = []
        self._per_slice = round(rate * SLICE_S)
        self._random = random.Random(0)
        self._replies = [
            (
                EncodedTensor.of(rng.integers(1, VOCAB_SIZE, length).astype(np.int32)),
                EncodedTensor.of(-rng.exponential(size=length).astype(np.float32)),
            )
            for length in map(int, rng.integers(MAX_TOKENS // 4, MAX_TOKENS, size=64))
        ]

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One of the answers, when its turn has come."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn
        token_ids, logprobs = self._replies[(request.seed or 0) % len(self._replies)]
        spans = (VersionSpan(self.weights.version, 0, token_ids.shape[0]),)
        reply = GenerateReply(
            request_id=request.request_id, token_ids=token_ids, logprobs=logprobs, finish_reason="stop", versions=spans
        )
        return check_reply(request, reply, VOCAB_SIZE)

    async def answer(self) -> None:
        """Answer until cancelled."""
        while True:
            started = time.perf_counter()
            num = self._per_slice or len(self.waiting)
            for _ in range(min(num, len(self.waiting))):
                self._take().set_result(None)
            await asyncio.sleep(max(0.0, started + SLICE_S - time.perf_counter()))

    def _take(self) -> "asyncio.Future[None]":
        place = self._random.randrange(len(self.waiting))
        self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
        return self.waiting.pop()


def make_config(folder: Path, num_in_flight: int, steps: int) -> OrchestratorConfig:
    """One environment; no files but outbox, ledger and state."""
    config: OrchestratorConfig = OrchestratorConfig.model_validate(
        {
            "run": {"name": "bench", "dir": str(folder)},
            "model": {"path": str(folder)},
            "envs": [{"id": "fake", "group_size": GROUP_SIZE, "sampling": {"max_tokens": MAX_TOKENS}}],
            "server": {"endpoint": "tcp://127.0.0.1:*", "max_ahead": 8},
            "metrics": {"tensorboard": False},
            "max_steps": steps,
            "batch_size": BATCH_SIZE,
            "max_staleness": MAX_STALENESS,
            "max_in_flight": num_in_flight,
            "save_rollouts": False,
        }
    )
    return config


async def measure(num_in_flight: int, steps: int, rate: float) -> dict[str, float | str]:
    """Figures of one run."""
    engine, probe = PacedEngine(rate), Probe()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), num_in_flight, steps)
        run_dir = RunDir(config.run.path).create()
        metrics = MetricLog("orchestrator", run_dir, config.metrics)
        env = FakeEnv(engine)
        async with BatchServer(config.server.endpoint, open_outbox(run_dir, "bench")) as server:
            health = Health("orchestrator", config.stall_timeout_s)
            orchestrator = Orchestrator(config, run_dir, engine, [env], server, health, metrics)
            trainer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.fakes", server.endpoint, "bench", "0"), stdout=subprocess.DEVNULL
            )
            before = _resident_bytes()
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                running = tasks.create_task(orchestrator.run(asyncio.Event()))
                await _until(lambda: len(engine.waiting) > num_in_flight - GROUP_SIZE)
                memory_bytes = (_resident_bytes() - before) / num_in_flight
                answering = tasks.create_task(engine.answer())
                figures = await _pace(server, steps, probe, tasks)
                await running
                answering.cancel()
            await trainer.wait()
        metrics.close()
    return {
        "in_flight": num_in_flight,
        "offered_per_s": rate or "all at once",
        **figures,
        "bytes_per_rollout_in_flight": memory_bytes,
    }


async def _pace(server: BatchServer, steps: int, probe: Probe, tasks: asyncio.TaskGroup) -> dict[str, float]:
    """Rollouts per second in durable batches, after the first, and while slots are still refilled."""
    await _until(lambda: server.outbox.next_step > WARM_UP_STEPS)
    probing = tasks.create_task(probe.run())
    wall, cpu, first = time.perf_counter(), time.process_time(), server.outbox.next_step
    await _until(lambda: server.outbox.next_step > steps - DRAIN_STEPS)
    num_rollouts = (server.outbox.next_step - first) * BATCH_SIZE
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    probing.cancel()
    return {
        "rollouts_per_cpu_s": num_rollouts / cpu,
        "rollouts_per_s": num_rollouts / wall,
        "share_of_a_core": cpu / wall,
        **{f"lag_p{q}_cpu_ms": 1000 * float(np.percentile(probe.cpu_s, q)) for q in (50, 99)},
        **{f"lag_p{q}_wall_ms": 1000 * float(np.percentile(probe.wall_s, q)) for q in (50, 99)},
    }


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is watched belongs to parts that know no benchmark
        await asyncio.sleep(TICK_S)


def _resident_bytes() -> int:
    gc.collect()
    return harness.memory_bytes()


def fakes_cpu_us(num_rollouts: int = 4000) -> float:
    """CPU microseconds per rollout of the fakes themselves (engine and environment), part of every figure."""

    async def spend() -> float:
        engine = PacedEngine(0.0)
        env = FakeEnv(engine)
        requests = [
            RolloutRequest(env.examples[index], f"fake/{index}/0", 0, 1, index, 1.0, MAX_TOKENS, 60.0)
            for index in range(num_rollouts)
        ]
        started = time.process_time()
        answering = asyncio.create_task(engine.answer())
        await asyncio.gather(*(env.run(request) for request in requests))
        answering.cancel()
        return time.process_time() - started

    return 1e6 * uvloop.run(spend()) / num_rollouts


def compare(in_flight: int, steps: int, rate: float) -> dict[str, object]:
    """`steps` batches a run; `rate` answers a second, then all at once."""
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runs = [uvloop.run(measure(in_flight, steps, each)) for each in (rate, 0.0)]
    in_flight_bytes = [run.pop("bytes_per_rollout_in_flight") for run in runs]
    return {
        "group_size": GROUP_SIZE,
        "batch_size": BATCH_SIZE,
        "max_staleness": MAX_STALENESS,
        "prompt_tokens": PROMPT_TOKENS,
        "mean_completion_tokens": 5 * MAX_TOKENS // 8,
        "fakes_cpu_us_per_rollout": fakes_cpu_us(),
        "bytes_per_rollout_in_flight": in_flight_bytes[0],  # later runs use the memory of the first again
        "runs": runs,
    }


if __name__ == "__main__":
    harness.main("scheduler", __doc__, compare, in_flight=10_000, steps=12, rate=3_500.0)
