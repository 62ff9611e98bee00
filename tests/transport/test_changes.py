"""`Changes`: no waiter misses a change that came after it looked."""

import asyncio

import pytest

from tests.support.waiting import until_async
from transport.changes import Changes


class Counter:
    """A state that tasks wait for, and how often they looked at it."""

    def __init__(self) -> None:
        self.value = 0
        self.num_looks = 0
        self.changes = Changes()

    def set(self, value: int) -> None:
        self.value = value
        self.changes.notify()

    async def wait_until(self, value: int) -> int:
        def reached() -> bool:
            self.num_looks += 1
            return self.value >= value

        await self.changes.wait_for(reached)
        return self.value


async def test_state_that_holds_already_is_not_waited_for() -> None:
    counter = Counter()
    await asyncio.wait_for(counter.wait_until(0), 10)
    assert counter.num_looks == 1


async def test_change_between_the_look_and_the_wake_up_is_not_lost() -> None:
    counter = Counter()
    waiter = asyncio.create_task(counter.wait_until(3))
    await until_async(lambda: counter.num_looks == 1)
    counter.set(1)
    counter.set(2)
    counter.set(3)  # before the waiter had a chance to run at all
    assert await asyncio.wait_for(waiter, 10) == 3


async def test_every_waiter_is_woken_and_returns_only_when_its_own_predicate_holds() -> None:
    counter = Counter()
    first, second, later = (asyncio.create_task(counter.wait_until(value)) for value in (1, 1, 2))
    await until_async(lambda: counter.num_looks == 3)
    counter.set(1)
    await asyncio.wait_for(asyncio.gather(first, second), 10)
    assert not later.done()
    counter.set(2)
    assert await asyncio.wait_for(later, 10) == 2


async def test_cancelled_waiter_takes_no_change_from_the_others() -> None:
    counter = Counter()
    cancelled, other = (asyncio.create_task(counter.wait_until(1)) for _ in range(2))
    await until_async(lambda: counter.num_looks == 2)
    counter.set(1)
    cancelled.cancel()  # it has been woken, and has not run yet
    assert await asyncio.wait_for(other, 10) == 1
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_waiter_without_a_change_runs_into_its_deadline() -> None:
    counter = Counter()
    counter.set(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await counter.wait_until(2)


async def test_wait_returns_after_the_next_change_and_not_for_an_earlier_one() -> None:
    changes = Changes()
    changes.notify()
    waiter = asyncio.create_task(changes.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiter.done()
    changes.notify()
    await asyncio.wait_for(waiter, 10)


async def test_waiter_looks_once_for_each_time_it_is_woken() -> None:
    counter = Counter()
    waiter = asyncio.create_task(counter.wait_until(9))
    await until_async(lambda: counter.num_looks == 1)
    for num_looks in (2, 3):
        counter.changes.notify()
        await until_async(lambda num_looks=num_looks: counter.num_looks == num_looks)
    waiter.cancel()
