"""A pinned version stays live: newer weights wait for the end of the evaluation."""

import asyncio

from tests.orchestrator.core.test_policy import Announcements, FlakyEngine, make_policy
from tests.support.waiting import until_async

MANY_TURNS = 50
"""Turns of the loop in which the policy would have applied the weights."""


async def test_newer_weights_wait_until_the_version_is_no_longer_pinned() -> None:
    engine, source = FlakyEngine(), Announcements()
    policy = make_policy(engine, source)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(policy.run())
        async with policy.pinned() as version:
            source.announce(1)
            for _ in range(MANY_TURNS):
                await asyncio.sleep(0)
            assert (version, policy.live, engine.asked) == (0, 0, [])
        await until_async(lambda: policy.live == 1)
        following.cancel()
    assert engine.asked == [1]
