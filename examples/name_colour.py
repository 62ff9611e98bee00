"""`name-colour`: name the colour of a drawn image. One turn, reward 1 for the exact word."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from colour_puzzle import COLOUR
from text_taskset import last_reply

__all__ = ["NameColourTaskset"]


class ColourData(vf.TaskData):
    """One image."""

    number: int
    """Which one."""
    answer: str
    """The only right reply."""


class ColourTask(vf.Task[ColourData]):
    """An image that is named in one reply."""

    @vf.reward
    async def exact_match(self, task: ColourData, trace: vf.Trace) -> float:
        """1 if the reply is the name, to the letter; else 0."""
        return float(last_reply(trace) == task.answer)


class ColourTasksetConfig(vf.TasksetConfig):
    """Which images are shown."""

    num_examples: int = Field(256, ge=1)
    """Different images."""
    first: int = Field(0, ge=0)
    """Number of the first image: an evaluation shows others than the training."""


class NameColourTaskset(vf.Taskset[ColourTask, ColourTasksetConfig]):
    """Images in the order of their numbers; the number is the id."""

    def load(self) -> Iterator[ColourTask]:
        """All images."""
        for number in range(self.config.first, self.config.first + self.config.num_examples):
            yield self.task(
                ColourData(id=str(number), prompt=[image_message(number)], number=number, answer=COLOUR.answer(number))
            )

    def task(self, data: ColourData) -> ColourTask:
        """The task of one image; subclasses with their own `Task` override it."""
        return ColourTask(data, self.config.task)


def image_message(number: int) -> vf.UserMessage:
    """The user shows image `number` and asks for its colour."""
    image = {"type": "image_url", "image_url": {"url": COLOUR.data_url(number)}}
    return vf.UserMessage(content=[image, {"type": "text", "text": COLOUR.question}])
