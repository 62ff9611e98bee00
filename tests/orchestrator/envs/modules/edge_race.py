"""A jointly scored environment: the longest reply of the group wins."""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf


class Race(vf.Task[vf.TaskData]):
    pass


class RacesConfig(vf.TasksetConfig):
    num_missing: int = 0
    """Runs that are not started."""


class Races(vf.Taskset[Race, RacesConfig]):
    def load(self) -> Iterable[Race]:
        for index in range(2):
            yield Race(vf.TaskData(prompt=f"race {index}"))


class RaceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    group_size: int = 2


class RaceEnv(vf.Env[RaceConfig]):
    async def run(self, task: Race, agents: vf.Agents) -> None:
        num_runs = self.config.group_size - self.config.taskset.num_missing
        await asyncio.gather(*(agents.agent.run(task) for _ in range(num_runs)))

    async def finalize(self, task: Race, episode: vf.Episode) -> None:
        longest = max(len(trace.last_reply) for trace in episode.traces)
        for trace in episode.traces:
            trace.record_reward("won", float(len(trace.last_reply) == longest))


__all__ = ["RaceEnv", "Races"]
