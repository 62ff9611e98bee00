"""A plain single-turn environment whose behaviour is chosen by its args."""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Config(vf.TaskConfig):
    scoring: str = "exact"


class Single(vf.Task[Data, vf.State, Config]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        match self.config.scoring:
            case "nan":
                return float("nan")
            case "raise":
                raise ValueError("cannot score this")
            case "hang":
                await asyncio.Event().wait()
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def truncated(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)

    @vf.metric
    async def reply_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SingleConfig(vf.TasksetConfig):
    num_tasks: int = 3
    named: bool = False
    scoring_timeout_s: float | None = None
    task: Config = Config()


class Singles(vf.Taskset[Single, SingleConfig]):
    def load(self) -> Iterable[Single]:
        timeout = vf.TaskTimeout(scoring=self.config.scoring_timeout_s)
        for index in range(self.config.num_tasks):
            name = f"word-{index}" if self.config.named else None
            data = Data(id=name, prompt=f"say {index}", system_prompt="be brief", answer=f"{index}", timeout=timeout)
            yield Single(data, self.config.task)


__all__ = ["Singles"]
