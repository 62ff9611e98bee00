"""The orchestrator's side of a worker, against a peer that says what the test wants. No process is started."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.workers.frames import FrameLink
from orchestrator.envs.workers.messages import FROM_WORKER, TO_WORKER, Answer, Broken, Done, RolloutFrame, ToWorker
from orchestrator.envs.workers.process import WorkerProcess
from orchestrator.envs.workers.worker import Worker, WorkerGone
from orchestrator.images.shelf import PictureShelf
from orchestrator.rollout import Example
from runtime.errors import UserError
from tests.support.waiting import until_async
from transport.generation import GenerateReply
from transport.tensor import EncodedTensor

PATIENCE_S = 30.0
REQUEST = RolloutRequest(
    example=Example("toy", "0", 0),
    group_id="toy/0/0",
    index=0,
    group_size=2,
    seed=1,
    temperature=1.0,
    max_tokens=4,
    timeout_s=PATIENCE_S,
)


class NoProcess(WorkerProcess):
    """Only the way it ended."""

    def __init__(self) -> None:
        pass

    def end(self, grace_s: float = 0.0) -> str:
        return "exit code 0"


@asynccontextmanager
async def worker_and_peer() -> AsyncIterator[tuple[Worker, FrameLink[ToWorker]]]:
    ours, theirs = socket.socketpair()
    link, peer = await FrameLink.open(ours, FROM_WORKER), await FrameLink.open(theirs, TO_WORKER)
    try:
        yield Worker(NoProcess(), link, ScriptedEngine(16, 0), PictureShelf()), peer
    finally:
        await link.hang_up()
        await peer.hang_up()


async def test_blocked_worker_is_not_waited_for_when_its_link_is_closed() -> None:
    ours, theirs = socket.socketpair()
    link = await FrameLink.open(ours, FROM_WORKER)
    tokens = EncodedTensor.of(np.zeros(1 << 18, np.int32))
    reply = GenerateReply(request_id="r", token_ids=tokens, logprobs=tokens, finish_reason="stop", versions=())
    for number in range(4):  # far more than the buffers of a socket pair hold
        link.send(Answer(id=number, reply=reply))
    with theirs:
        async with asyncio.timeout(PATIENCE_S):
            await link.hang_up()


async def test_run_that_is_over_does_not_hear_of_it_twice() -> None:
    async with worker_and_peer() as (worker, peer), asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(worker.serve())
        run = asyncio.create_task(worker.run(REQUEST))
        await until_async(lambda: worker.num_in_flight == 1, PATIENCE_S)
        for _ in range(2):  # both are read in one go, before the run takes notice
            peer.send(Broken(id=0, reason="no column"))
        with pytest.raises(UserError, match="no column"):
            await run
        assert not serving.done()
        await peer.close()
        assert await serving == ""


async def test_rollout_whose_messages_make_no_sense_costs_the_worker() -> None:
    frame = RolloutFrame(
        env_name="toy",
        example_id="0",
        reward=0.0,
        branches=(),
        temperature=1.0,
        is_truncated=False,
        metrics={},
        messages=b"{",
        duration_s=0.0,
        sampling_args={},
        columns={},
    )
    async with worker_and_peer() as (worker, peer), asyncio.timeout(PATIENCE_S):
        run = asyncio.create_task(worker.run(REQUEST))
        await until_async(lambda: worker.num_in_flight == 1, PATIENCE_S)
        peer.send(Done(id=0, results=(frame,)))
        problem = await worker.serve()
        assert "do not decode" in problem
        await worker.end(0.0, problem)
        with pytest.raises(WorkerGone, match="do not decode"):
            await run
