"""What asynchrony buys and costs: the real orchestrator, synchronous and under each staleness policy, all else equal.

    python -m benchmarks.async_vs_sync [--steps 20] [--median-s 0.4]

Every answer takes a log-normal time (sigma 1.0, cut off at `CAP` medians, as `max_tokens` does) and has as many tokens
in proportion; the engine runs `BATCH_SIZE` rollouts at a time however long they take. The trainer is the real client
in its own process; its step takes `load` times as long as the engine needs for a batch when all slots are busy: at 1
neither side is the bottleneck by itself, at 2 the trainer is. Batches travel through the real outbox and server.

`speed_up` is steps per second over those of the synchronous run, counted from the end of the first step.
`trainer_idle` is the share of that time that the trainer waited. `length_bias` is mean tokens trained over mean tokens
that the engine was asked for, `waste` the share of these that was not trained: stale groups, groups without signal, and
what the end of the run cut off.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import uvloop
from loguru import logger

from benchmarks import harness
from benchmarks.fakes import FakeEnv
from orchestrator.cli import SWITCH_INTERVAL_S
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.orchestrator import Orchestrator, open_outbox
from runtime.health.health import Health
from runtime.metrics.metric_log import MetricLog
from runtime.run_dir.run_dir import RunDir
from transport.server.server import BatchServer
from transport.wire.generation import GenerateRequest

BATCH_SIZE, GROUP_SIZE = 64, 8
SIGMA, CAP = 1.0, 8.0
MEDIAN_TOKENS = 40
CASES = (("wait", 0), ("wait", 1), ("wait", 2), ("wait", 4), ("drop", 1), ("drop", 2))
"""Policy and `max_staleness`; the first is the synchronous run that the others are compared with."""
LOADS = (1.0, 2.0)
DEADLINE_S = 600.0

Figures = dict[str, float | str]


class ModelledEngine(ScriptedEngine):
    """Latencies and lengths from one table: what a request gets depends on its seed alone."""

    def __init__(self, median_s: float) -> None:
        self._factors = np.minimum(np.random.default_rng(0).lognormal(0.0, SIGMA, size=4096), CAP)
        self.step_s = float(self._factors.mean()) * median_s
        """Seconds that a batch takes when all `BATCH_SIZE` slots are busy."""
        self.generated: list[int] = []
        tokens = np.ones(int(CAP * MEDIAN_TOKENS) + 1, np.int32)
        super().__init__(
            1000,
            0,
            script=lambda request: tokens[: self._length(request)],
            latency=lambda request, _: median_s * self._factor(request),
        )

    def _factor(self, request: GenerateRequest) -> float:
        return float(self._factors[(request.seed or 0) % len(self._factors)])

    def _length(self, request: GenerateRequest) -> int:
        length = max(1, round(MEDIAN_TOKENS * self._factor(request)))
        self.generated.append(length)
        return length


def make_config(folder: Path, max_staleness: int, steps: int, policy: str) -> OrchestratorConfig:
    """The same run but for `max_staleness` and `staleness_policy`."""
    config: OrchestratorConfig = OrchestratorConfig.model_validate(
        {
            "run": {"name": "bench", "dir": str(folder)},
            "model": {"path": str(folder)},
            "envs": [{"id": "fake", "group_size": GROUP_SIZE, "sampling": {"max_tokens": 1024}}],
            "server": {"endpoint": "tcp://127.0.0.1:*"},
            "metrics": {"tensorboard": False},
            "max_steps": steps,
            "batch_size": BATCH_SIZE,
            "max_staleness": max_staleness,
            "staleness_policy": policy,
            "max_in_flight": BATCH_SIZE,
            "save_rollouts": False,
        }
    )
    return config


async def run_once(max_staleness: int, steps: int, median_s: float, load: float = 1.0, policy: str = "wait") -> Figures:
    """Figures of one run."""
    engine = ModelledEngine(median_s)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), max_staleness, steps, policy)
        run_dir = RunDir(config.run.path).create()
        metrics = MetricLog("orchestrator", run_dir, config.metrics)
        async with BatchServer(config.server.endpoint, open_outbox(run_dir, "bench")) as server:
            health = Health("orchestrator", config.stall_timeout_s)
            orchestrator = Orchestrator(config, run_dir, engine, [FakeEnv(engine)], server, health, metrics)
            trainer = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.fakes", server.endpoint, "bench", str(load * engine.step_s)),
                stdout=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(DEADLINE_S):
                await orchestrator.run(asyncio.Event())
                said, _ = await trainer.communicate()
        metrics.close()
    case: Figures = {"load": load, "policy": policy, "max_staleness": max_staleness}
    return case | _figures(json.loads(said), engine.generated)


def _figures(trained: dict[str, float], generated: list[int]) -> dict[str, float]:
    return {
        "steps_per_s": (trained["steps"] - 1) / trained["elapsed_s"],
        "trainer_idle": trained["waited_s"] / trained["elapsed_s"],
        "length_bias": trained["trained_tokens"] / trained["samples"] / float(np.mean(generated)),
        "waste": 1 - trained["trained_tokens"] / sum(generated),
    }


def compare(steps: int, median_s: float, load: float) -> list[Figures]:
    """One run for each of `CASES`, the synchronous one first."""
    runs: list[Figures] = []
    for policy, max_staleness in CASES:
        run = uvloop.run(run_once(max_staleness, steps, median_s, load, policy))
        runs.append(run | {"speed_up": float(run["steps_per_s"]) / float((runs or [run])[0]["steps_per_s"])})
        print(
            {key: value if isinstance(value, str) else round(value, 3) for key, value in runs[-1].items()}, flush=True
        )
    return runs


def measure(steps: int, median_s: float) -> dict[str, object]:
    """`steps` batches a run; `median_s` is the median time of one answer."""
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    runs = [run for load in LOADS for run in compare(steps, median_s, load)]
    return {
        "batch_size": BATCH_SIZE,
        "group_size": GROUP_SIZE,
        "sigma": SIGMA,
        "cap_in_medians": CAP,
        "median_s": median_s,
        "generation_s_per_batch": ModelledEngine(median_s).step_s,
        "steps": steps,
        "runs": runs,
    }


if __name__ == "__main__":
    harness.main("async_vs_sync", __doc__, measure, steps=20, median_s=0.4)
