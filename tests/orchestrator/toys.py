"""A whole orchestrator in miniature: a toy environment and a scripted engine; `tests.support.fakes` has the trainer."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chat.trajectory import Branch
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.protocol import Engine
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest
from orchestrator.orchestrator import Orchestrator, open_outbox
from orchestrator.teachers.scored_env import AnyTeacher
from orchestrator.values.rollout import Example, Rollout, RolloutFailure
from runtime.health.health import Health
from runtime.metrics.metric_log import MetricLog
from runtime.run_dir.run_dir import RunDir
from tests.support.fakes import FakeTrainer, training
from transport.server.server import BatchServer
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

DEADLINE_S = 60.0
Reward = Callable[[GenerateReply], float]


def parity(reply: GenerateReply) -> float:
    """1 for an even sum of tokens: about half of all rollouts."""
    return float(reply.token_ids.numpy().sum() % 2 == 0)


def make_engine(**kwargs: Any) -> ScriptedEngine:
    """16 tokens, 0 ends a completion."""
    return ScriptedEngine(16, 0, **kwargs)


class ToyEnv:
    """Implements `EnvAdapter`: one completion per rollout, scored by `reward`. `fault` may replace it or raise."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str = "toy",
        num_examples: int = 40,
        reward: Reward = parity,
        scores_jointly: bool = False,
        fault: Callable[[RolloutRequest], RolloutFailure | None] = lambda request: None,
    ) -> None:
        self.name = name
        self.scores_jointly = scores_jointly
        self.requests: list[RolloutRequest] = []
        self.is_open = False
        self._engine = engine
        self._reward = reward
        self._fault = fault
        self._examples = [Example(name, str(index), index) for index in range(num_examples)]

    @property
    def examples(self) -> Sequence[Example]:
        return self._examples

    async def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        self.requests.append(request)
        size = request.group_size if self.scores_jointly else 1
        return [await self._one(request, offset) for offset in range(size)]

    async def _one(self, request: RolloutRequest, offset: int) -> Rollout | RolloutFailure:
        await asyncio.sleep(0)
        failure = self._fault(request)
        if failure is not None:
            return failure
        prompt = np.array([1, 2 + request.example.payload % 10], dtype=np.int32)
        generate = GenerateRequest(
            request_id=f"{request.group_id}#{request.index + offset}",
            token_ids=EncodedTensor.of(prompt),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed + 1000 * offset,
        )
        reply = await self._engine.generate(generate)
        return self._rollout(request, prompt, reply)

    def _rollout(self, request: RolloutRequest, prompt: "np.ndarray[Any, Any]", reply: GenerateReply) -> Rollout:
        completion = reply.token_ids.numpy()
        branch = Branch(
            token_ids=np.concatenate([prompt, completion]),
            sampled=np.array([False] * len(prompt) + [True] * len(completion)),
            logprobs=np.concatenate([np.zeros(len(prompt), np.float32), reply.logprobs.numpy()]),
            versions=tuple(
                VersionSpan(span.version, span.start + len(prompt), span.end + len(prompt)) for span in reply.versions
            ),
        )
        return Rollout(
            env_name=self.name,
            example_id=request.example.example_id,
            reward=self._reward(reply),
            branches=(branch,),
            temperature=request.temperature,
            is_truncated=reply.finish_reason == "length",
            metrics={"num_sampled": float(len(completion))},
            messages=({"role": "assistant", "content": str(completion.tolist())},),
            duration_s=0.0,
        )


def make_config(folder: Path, **changes: Any) -> OrchestratorConfig:
    """A small run below `folder`; `changes` are top-level keys."""
    values: dict[str, Any] = {
        "run": {"name": "toy", "dir": str(folder)},
        "model": {"path": str(folder)},
        "envs": [{"id": "toy", "group_size": 4, "sampling": {"max_tokens": 6}}],
        "server": {"endpoint": free_endpoint(), "peer_timeout_s": 2.0},
        "health": {"port": 0},
        "metrics": {"tensorboard": False},
        "max_steps": 4,
        "batch_size": 8,
        "max_staleness": 1,
        "max_in_flight": 64,
    }
    return OrchestratorConfig(**(values | changes))


async def run_orchestrator(
    config: OrchestratorConfig,
    engine: Engine,
    adapters: Sequence[EnvAdapter],
    stop: asyncio.Event | None = None,
    eval_adapters: Sequence[EnvAdapter] = (),
    teachers: Sequence[AnyTeacher] = (),
    **wiring: Any,
) -> None:
    """The real orchestrator in this loop, until the run ends, is stopped, or raises; `wiring` are keywords of it."""
    run_dir = RunDir(config.run.path).create()
    health = Health("orchestrator", config.stall_timeout_s)
    metrics = MetricLog("orchestrator", run_dir, config.metrics)
    outbox = open_outbox(run_dir, config.run.name)
    async with asyncio.timeout(DEADLINE_S), BatchServer(config.server.endpoint, outbox, peer_timeout_s=2.0) as server:
        orchestrator = Orchestrator(
            config, run_dir, engine, adapters, server, health, metrics, eval_adapters, teachers, **wiring
        )
        await orchestrator.run(stop or asyncio.Event())


async def run_toy(
    config: OrchestratorConfig,
    engine: Engine,
    adapters: Sequence[EnvAdapter],
    teachers: Sequence[AnyTeacher] = (),
    **wiring: Any,
) -> FakeTrainer:
    """A whole run with a trainer, from the start or from where the run directory stands."""
    with training(FakeTrainer(config.server.endpoint)) as trainer:
        await run_orchestrator(config, engine, adapters, teachers=teachers, **wiring)
    return trainer


def write_config(config: OrchestratorConfig, folder: Path) -> Path:
    """The config as a file that `@` reads."""
    path = folder / "orchestrator.toml"
    path.write_bytes(msgspec.toml.encode(_without_none(config.model_dump(mode="json"))))
    return path


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def free_endpoint() -> str:
    """An address that nobody uses right now, for a server that has to come back under the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
