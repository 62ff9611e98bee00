"""A two-turn environment: it answers the model's first reply, optionally with an edited history or an error."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Data(vf.TaskData):
    mood: str = "plain"


class Talk(vf.Task[Data]):
    @vf.reward
    async def num_replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class Talks(vf.Taskset[Talk]):
    def load(self) -> Iterable[Talk]:
        for mood in ("plain", "raise", "second agent"):
            yield Talk(Data(prompt=f"hello {mood}", mood=mood))


class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = False

    async def run(self, task: Talk, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            if task.data.mood == "raise":
                raise RuntimeError("the environment tripped")
            await talk.turn(f"you said {first.last_reply!r}, say more")
        if task.data.mood == "second agent":
            await agents.critic.run(task)


__all__ = ["TalkEnv", "Talks"]
