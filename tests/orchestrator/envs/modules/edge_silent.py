"""Tasks of which one has no prompt."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Silent(vf.Task[vf.TaskData]):
    @vf.reward
    async def nothing(self) -> float:
        return 0.0


class Silents(vf.Taskset[Silent]):
    def load(self) -> Iterable[Silent]:
        yield Silent(vf.TaskData(prompt="go"))
        yield Silent(vf.TaskData())


__all__ = ["Silents"]
