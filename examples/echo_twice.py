"""`echo-twice`: copy a word, then copy it again when asked. Two turns of one conversation.

The first turn is `copy-text`, so that a model warm-started on it earns half of the reward at once; the second answer
stands only in the conversation, so it is right only if the turns before were kept.
"""

import verifiers.v1 as vf

from text_puzzle import COPY
from text_taskset import TextData, TextTask, TextTaskset, TextTasksetConfig, replies

__all__ = ["EchoTwiceEnv", "EchoTwiceTaskset"]

NUM_TURNS = 2
SECOND_PROMPT = "again"


class EchoTwiceTask(TextTask):
    """A word to repeat in every turn."""

    @vf.reward
    async def exact_match(self, task: TextData, trace: vf.Trace) -> float:
        """Share of the turns whose reply is exactly the word; a turn that never came counts as wrong."""
        return sum(reply == task.answer for reply in replies(trace)[:NUM_TURNS]) / NUM_TURNS


class EchoTwiceTaskset(TextTaskset, vf.Taskset[EchoTwiceTask, TextTasksetConfig]):
    """Questions of `copy-text`, scored over two turns."""

    puzzle = COPY

    def task(self, data: TextData) -> EchoTwiceTask:
        """The two-turn task of one row."""
        return EchoTwiceTask(data, self.config.task)


class EchoTwiceEnvConfig(vf.EnvConfig):
    """One seat."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class EchoTwiceEnv(vf.Env[EchoTwiceEnvConfig]):
    """The environment is the user: it asks, takes the reply, and asks again."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One conversation; it ends early if the agent's run does."""
        async with agents.agent.interaction(task) as conversation:
            opening = await conversation.turn()
            if not opening.terminated:
                await conversation.turn(SECOND_PROMPT)
