"""A task with a stop hook."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Stopped(vf.Task[vf.TaskData]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0


class Stoppeds(vf.Taskset[Stopped]):
    def load(self) -> Iterable[Stopped]:
        yield Stopped(vf.TaskData(prompt="go"))


__all__ = ["Stoppeds"]
