"""`colour-twice`: name the colour of an image, then of another one, then of the first again. Three turns.

The second image comes in a later turn, and the last answer is right only if the first image was kept: what a
conversation with images can get wrong shows in the reward.
"""

import verifiers.v1 as vf

from colour_puzzle import COLOUR
from name_colour import ColourData, ColourTask, ColourTasksetConfig, NameColourTaskset, image_message
from text_taskset import replies

__all__ = ["ColourTwiceEnv", "ColourTwiceTaskset"]

FAR = 1_000_000
"""The second image of task `n` is image `n + FAR`."""
LAST_PROMPT = "first?"


class ColourTwiceTask(ColourTask):
    """Two images and three questions."""

    @vf.reward
    async def exact_match(self, task: ColourData, trace: vf.Trace) -> float:
        """Share of the turns whose reply is the right name; a turn that never came counts as wrong."""
        answers = (task.answer, COLOUR.answer(task.number + FAR), task.answer)
        return sum(reply == answer for reply, answer in zip(replies(trace), answers, strict=False)) / len(answers)


class ColourTwiceTaskset(NameColourTaskset, vf.Taskset[ColourTwiceTask, ColourTasksetConfig]):
    """Images of `name-colour`, scored over three turns."""

    def task(self, data: ColourData) -> ColourTwiceTask:
        """The three-turn task of one image."""
        return ColourTwiceTask(data, self.config.task)


class ColourTwiceEnvConfig(vf.EnvConfig):
    """One seat."""

    agent: vf.AgentConfig = vf.AgentConfig()
    """The policy."""


class ColourTwiceEnv(vf.Env[ColourTwiceEnvConfig]):
    """The environment is the user: it shows an image, shows another, and asks about the first."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """One conversation; it ends early if the agent's run does."""
        async with agents.agent.interaction(task) as conversation:
            for message in (None, [image_message(task.data.number + FAR)], LAST_PROMPT):
                if (await conversation.turn(message)).terminated:
                    return
