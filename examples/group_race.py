"""`group-race`: all rollouts of an example race each other. The episode is the group, and rewards are relative.

verifiers has no flag for joint scoring: an `Env` whose config has a `group_size` runs that many siblings in one episode
and records the rewards that compare them in `finalize`. The orchestrator sets `group_size` to its own.
"""

import asyncio
from collections.abc import Sequence
from itertools import takewhile

import verifiers.v1 as vf
from pydantic import Field

from text_puzzle import COPY
from text_taskset import TextData, TextTask, TextTaskset, TextTasksetConfig, last_reply

__all__ = ["GroupRaceEnv", "GroupRaceTaskset"]


def distance(reply: str, answer: str) -> int:
    """How far a reply gets: right letters before the first wrong one, and one more for ending where the answer ends."""
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reply, answer, strict=False)))
    return right + (reply == answer)


def standings(distances: Sequence[int]) -> list[float]:
    """For each runner the share of the others that it beats, a tie counting half. The mean is 0.5 for any outcome."""
    others = len(distances) - 1
    if others < 1:
        raise ValueError("a race needs at least two runners")
    return [(sum(own > other for other in distances) + (distances.count(own) - 1) / 2) / others for own in distances]


class GroupRaceTask(TextTask):
    """A word to copy. Alone it is worth nothing; `GroupRaceEnv` gives the reward."""

    @vf.metric
    async def exact_match(self, task: TextData, trace: vf.Trace) -> float:
        """1 if the reply is the answer: a metric here, because the mean reward of a race never changes."""
        return float(last_reply(trace) == task.answer)


class GroupRaceTaskset(TextTaskset, vf.Taskset[GroupRaceTask, TextTasksetConfig]):
    """Questions of `copy-text`."""

    puzzle = COPY

    def task(self, data: TextData) -> GroupRaceTask:
        """One row as a race."""
        return GroupRaceTask(data, self.config.task)


class GroupRaceEnvConfig(vf.EnvConfig):
    """One seat, played by every sibling."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""
    group_size: int = Field(8, ge=2)
    """Siblings in one episode."""


class GroupRaceEnv(vf.Env[GroupRaceEnvConfig]):
    """Siblings run at the same time (with `max_concurrent_agents = None`) and are ranked when all are done."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """All siblings; one that raises cancels the rest, because a race with a missing runner has no ranks."""
        async with asyncio.TaskGroup() as siblings:
            for _ in range(self.config.group_size):
                siblings.create_task(agents.agent.run(task))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Record each sibling's standing as its reward."""
        distances = [distance(last_reply(trace), task.data.answer) for trace in episode.traces]
        for trace, standing in zip(episode.traces, standings(distances), strict=True):
            trace.record_reward("standing", standing)
