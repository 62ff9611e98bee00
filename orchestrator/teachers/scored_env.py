"""Environments as their algorithm wants them: played by the policy or a teacher, or scored by one (`ScoredEnv`)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from chat.tokenizer import Tokenizer
from chat.trajectory import Branch
from orchestrator.config.algorithm import OpdAlgorithmConfig, SftAlgorithmConfig, teacher_name
from orchestrator.config.envs import EnvConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.openai import OpenAIModel
from orchestrator.engines.protocol import EngineError, Model
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest
from orchestrator.teachers.teacher import Teacher
from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure


class ScoredEnv:
    """Every branch that is trained gets the log probabilities of `teacher`, which the caller starts and closes."""

    def __init__(self, env: EnvAdapter, teacher: Teacher) -> None:
        self.name = env.name
        self.scores_jointly = env.scores_jointly
        self._env = env
        self._teacher = teacher

    @property
    def examples(self) -> Sequence[Example]:
        return self._env.examples

    async def start(self) -> None:
        """First find out whether the teacher scores. Raises `PeerLostError`, `UserError`."""
        await self._teacher.check_scoring()
        await self._env.start()

    async def close(self) -> None:
        await self._env.close()

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        """Rollout and scoring share the request's deadline."""
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        results = await self._env.run(request)
        if not any(isinstance(result, Rollout) for result in results):
            return results  # nothing to score, and perhaps no time left: that is not the teacher's fault
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
                scored = [
                    tasks.create_task(self._scored(f"{request.group_id}#{request.index + offset}", result))
                    for offset, result in enumerate(results)
                ]
        except TimeoutError:
            message = f"{self._teacher} has not scored it {request.timeout_s:g} s after its start"
            overdue = RolloutFailure(FailureReason.TEACHER_ERROR, message)
            return [overdue if isinstance(result, Rollout) else result for result in results]
        return [task.result() for task in scored]

    async def _scored(self, trajectory_id: str, result: Rollout | RolloutFailure) -> Rollout | RolloutFailure:
        if isinstance(result, RolloutFailure):
            return result
        try:
            branches = [
                await self._score(f"{trajectory_id}/{position}", branch, result.temperature)
                for position, branch in enumerate(result.branches)
            ]
        except EngineError as error:
            return RolloutFailure(FailureReason.TEACHER_ERROR, f"{self._teacher}: {error}")
        return msgspec.structs.replace(result, branches=tuple(branches))

    async def _score(self, request_id: str, branch: Branch, temperature: float) -> Branch:
        if not branch.sampled.any():
            return branch
        if branch.images is not None:
            raise EngineError(f"{request_id} has images, which teachers do not score")
        logprobs = await self._teacher.score(request_id, branch.token_ids, temperature)
        return msgspec.structs.replace(branch, ref_logprobs=logprobs)


LoadEnv = Callable[[EnvConfig, Model], EnvAdapter]
AnyTeacher = Teacher | OpenAIModel


def make_teachers(
    config: OrchestratorConfig, vocab_size: int, tokenizer: Tokenizer | None = None
) -> dict[str, AnyTeacher]:
    """Those that an environment needs, by name, not started."""
    names = dict.fromkeys(teacher_name(config.algorithm_of(env)) for env in config.envs)
    return {name: _make(name, config, vocab_size, tokenizer) for name in names if name is not None}


def _make(name: str, config: OrchestratorConfig, vocab_size: int, tokenizer: Tokenizer | None) -> AnyTeacher:
    teacher = config.teachers[name]
    if teacher.backend == "openai":
        return OpenAIModel((teacher.url,), teacher, tokenizer, name=f"teacher {name!r}")
    return Teacher(name, teacher, vocab_size)


def load_envs(
    config: OrchestratorConfig, policy: Model, teachers: Mapping[str, AnyTeacher], load: LoadEnv
) -> list[EnvAdapter]:
    """One adapter per environment, in the order of the config. Environments with the same teacher share it."""
    return [_load(config, env, policy, teachers, load) for env in config.envs]


def _load(
    config: OrchestratorConfig, env: EnvConfig, policy: Model, teachers: Mapping[str, AnyTeacher], load: LoadEnv
) -> EnvAdapter:
    match config.algorithm_of(env):
        case SftAlgorithmConfig(teacher=name):
            return load(env, teachers[name])
        case OpdAlgorithmConfig(teacher=name):
            teacher = teachers[name]
            assert isinstance(teacher, Teacher), "the config says that it scores (`config_rules`)"
            return ScoredEnv(load(env, policy), teacher)
        case _:
            return load(env, policy)
