"""A task whose reward uses the runtime."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Boxed(vf.Task[vf.TaskData]):
    @vf.reward
    async def is_local(self, runtime: vf.Runtime) -> float:
        return float(runtime.is_local)


class Boxeds(vf.Taskset[Boxed]):
    def load(self) -> Iterable[Boxed]:
        yield Boxed(vf.TaskData(prompt="go"))


__all__ = ["Boxeds"]
