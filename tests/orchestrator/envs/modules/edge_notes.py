"""A task whose state is worth keeping: some of it, at least."""

from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import BaseModel


class Finding(BaseModel):
    text: str = ""


class Notes(vf.State):
    seen: tuple[str, ...] = ()
    best: Finding = Finding()
    handle: object = None


class Noted(vf.Task[vf.TaskData, Notes]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        trace.state.seen = (*trace.state.seen, trace.last_reply)
        trace.state.best = Finding(text=trace.last_reply)
        trace.state.handle = object()
        return float(len(trace.last_reply))


class Noteds(vf.Taskset[Noted]):
    def load(self) -> Iterable[Noted]:
        yield Noted(vf.TaskData(prompt="go"))


__all__ = ["Noteds"]
