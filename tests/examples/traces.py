"""Finished traces with chosen replies, as a run of verifiers hands them to a task's scoring."""

from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf


def load_env(env_id: str, *, group_size: int | None = None, **args: Any) -> vf.Env:
    """The environment by id, with nothing that would leave this process."""
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    extra = {} if group_size is None else {"group_size": group_size}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": env_id, **args}, "agent": agent, **extra}))


def tasks_of(env: vf.Env) -> list[vf.Task]:
    return list(env.taskset)


def finished_trace(task: vf.Task, replies: Sequence[str | None]) -> vf.Trace:
    """A conversation in which the model said `replies`, one per turn; `None` is a completion without text."""
    messages: list[tuple[Any, bool]] = []
    for reply in replies:
        messages += [(vf.UserMessage(content="question"), False), (vf.AssistantMessage(content=reply), True)]
    nodes = [
        vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=sampled)
        for i, (message, sampled) in enumerate(messages)
    ]
    config = vf.AgentConfig(model="scripted", runtime={"type": "subprocess"}, harness={"id": "null"})
    described = vf.TraceTask(type=type(task).__name__, data=task.data)
    return vf.Trace(task=described, agent=vf.AgentInfo(config=config), nodes=nodes, ok=True)


async def scored(task: vf.Task, *replies: str | None) -> vf.Trace:
    """The trace after the task's own scoring."""
    trace = finished_trace(task, replies)
    await task.score(trace)
    return trace
