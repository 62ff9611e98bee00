"""A task whose setup and finalize hooks leave marks that its reward reads."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Marks(vf.State):
    total: float = 0.0


class Hooked(vf.Task[vf.TaskData, Marks]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.total += 1

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.total += 2

    @vf.reward
    async def marks(self, trace: vf.Trace) -> float:
        return float(trace.state.total)


class Hookeds(vf.Taskset[Hooked]):
    def load(self) -> Iterable[Hooked]:
        yield Hooked(vf.TaskData(prompt="go"))


__all__ = ["Hookeds"]
