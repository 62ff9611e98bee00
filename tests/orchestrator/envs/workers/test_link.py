"""The orchestrator's side of a worker, against a peer that says what the test wants. No process is started."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from chat.images.patches import ImageCache
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.workers.link import (
    FROM_WORKER,
    HEAD_BYTES,
    TO_WORKER,
    Answer,
    Broken,
    FrameLink,
    RolloutsDone,
    ToWorker,
    decode_frame,
    encode_frame,
)
from orchestrator.envs.workers.process import WorkerProcess
from orchestrator.envs.workers.worker import Worker, WorkerGone
from orchestrator.errors import WorkerLinkError
from orchestrator.values.rollout import Example, Rollout
from runtime.errors import UserError
from tests.orchestrator.builders import make_rollout
from tests.support.waiting import until_async
from transport.wire.generation import GenerateReply
from transport.wire.sample import Array, EncodedTensor

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
        yield Worker(NoProcess(), link, ScriptedEngine(16, 0), ImageCache()), peer
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


def rollout_with(**arrays: Array) -> Rollout:
    rollout = make_rollout(length=3)
    for name, array in arrays.items():
        msgspec.structs.force_setattr(rollout.branches[0], name, array)
    return rollout


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param(rollout_with(logprobs=np.zeros(5)), id="another dtype"),
        pytest.param(rollout_with(sampled=np.zeros(4, np.bool_)), id="another length"),
        pytest.param(rollout_with(token_ids=np.zeros((1, 5), np.int32)), id="another shape"),
        pytest.param({"type": "rollout"}, id="no fields"),
    ],
)
async def test_rollout_that_makes_no_sense_costs_the_worker(rollout: Rollout) -> None:
    async with worker_and_peer() as (worker, peer), asyncio.timeout(PATIENCE_S):
        run = asyncio.create_task(worker.run(REQUEST))
        await until_async(lambda: worker.num_in_flight == 1, PATIENCE_S)
        peer.send(RolloutsDone(id=0, results=(rollout,)))
        problem = await worker.serve()
        assert "does not decode" in problem
        await worker.end(0.0, problem)
        with pytest.raises(WorkerGone, match="does not decode"):
            await run


def test_what_an_environment_puts_into_messages_is_sent_as_text() -> None:
    said = {"role": "tool", "content": Path("/x"), "numbers": {1: 2.5, "all": [None, np.float32(0.5)]}}
    rollout = msgspec.structs.replace(make_rollout(), messages=(said,))
    done = decode_frame(FROM_WORKER, encode_frame(RolloutsDone(id=0, results=(rollout,)))[HEAD_BYTES:])
    assert isinstance(done, RolloutsDone)
    (arrived,) = done.results
    assert isinstance(arrived, Rollout)
    assert arrived.messages == ({"role": "tool", "content": "/x", "numbers": {1: 2.5, "all": [None, "0.5"]}},)


@pytest.mark.parametrize("content", ["\udc80", 2**64, np.array(["a"])], ids=["surrogate", "integer", "array"])
def test_message_that_cannot_be_sent_is_an_error_with_its_reason(content: object) -> None:
    rollout = msgspec.structs.replace(make_rollout(), messages=({"content": content},))
    with pytest.raises(WorkerLinkError, match="cannot be sent"):
        encode_frame(RolloutsDone(id=0, results=(rollout,)))
