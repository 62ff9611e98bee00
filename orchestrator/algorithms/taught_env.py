"""Environments with a teacher: played by it (`sft`), or scored by it afterwards (`opd`). Both are `EnvAdapter`s."""

import asyncio
import dataclasses
from collections.abc import Sequence

from orchestrator.algorithms.chat_teacher import ChatTeacher
from orchestrator.algorithms.teacher import Teacher
from orchestrator.engines.protocol import EngineError
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest
from orchestrator.rollout import Branch, Example, Failure, FailureReason, Rollout


class PlayedEnv:
    """An environment whose rollouts the teacher generates; `env` was made with the teacher as its generator."""

    def __init__(self, env: EnvAdapter, teacher: Teacher | ChatTeacher) -> None:
        self.name = env.name
        self.scores_jointly = env.scores_jointly
        self._env = env
        self._player = teacher

    @property
    def examples(self) -> Sequence[Example]:
        """Those of the environment."""
        return self._env.examples

    async def start(self) -> None:
        """First the teacher: without it nothing can run. Raises `PeerLostError`, `UserError`."""
        await self._player.start()
        await self._env.start()

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | Failure]:
        """What the environment returns."""
        return await self._env.run(request)

    async def close(self) -> None:
        """Idempotent."""
        await self._env.close()
        await self._player.close()


class ScoredEnv(PlayedEnv):
    """An environment whose finished rollouts get the teacher's log probabilities on every branch that is trained."""

    def __init__(self, env: EnvAdapter, teacher: Teacher) -> None:
        super().__init__(env, teacher)
        self._teacher = teacher

    async def start(self) -> None:
        """Also find out whether the teacher scores."""
        await super().start()
        await self._teacher.check_scoring()

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | Failure]:
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
            overdue = Failure(FailureReason.TEACHER_ERROR, message)
            return [overdue if isinstance(result, Rollout) else result for result in results]
        return [task.result() for task in scored]

    async def _scored(self, trajectory_id: str, result: Rollout | Failure) -> Rollout | Failure:
        if isinstance(result, Failure):
            return result
        try:
            branches = [
                await self._score(f"{trajectory_id}/{position}", branch, result.temperature)
                for position, branch in enumerate(result.branches)
            ]
        except EngineError as error:
            return Failure(FailureReason.TEACHER_ERROR, f"{self._teacher}: {error}")
        return dataclasses.replace(result, branches=tuple(branches))

    async def _score(self, request_id: str, branch: Branch, temperature: float) -> Branch:
        if not branch.sampled.any():
            return branch
        if branch.pictures is not None:
            raise EngineError(f"{request_id} has pictures, which teachers do not score")
        logprobs = await self._teacher.score(request_id, branch.token_ids, temperature)
        return dataclasses.replace(branch, ref_logprobs=logprobs)
