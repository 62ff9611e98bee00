"""The number of rollouts follows the load of the engines."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engines.protocol import EngineError, EngineLoad, total_load
from orchestrator.policy.concurrency import Bounds, ConcurrencyController, next_limit
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_toy

BOUNDS = Bounds(lowest=8, highest=512)


def engine_with(capacity: int, in_flight: int) -> EngineLoad:
    return EngineLoad(min(in_flight, capacity), max(0, in_flight - capacity), capacity)


@pytest.mark.parametrize("start", [8, 100, 512])
@pytest.mark.parametrize("capacity", [16, 64, 256])
def test_the_limit_settles_where_every_place_is_filled_and_few_wait(start: int, capacity: int) -> None:
    limit = start
    for _ in range(60):
        limit = next_limit(limit, in_flight=limit, load=engine_with(capacity, limit), bounds=BOUNDS)
    assert capacity <= limit <= 1.25 * capacity + 1


@given(
    limit=st.integers(1, 2000),
    in_flight=st.integers(0, 2000),
    load=st.builds(EngineLoad, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000)),
)
def test_the_limit_stays_within_its_bounds(limit: int, in_flight: int, load: EngineLoad) -> None:
    assert BOUNDS.lowest <= next_limit(limit, in_flight, load, BOUNDS) <= BOUNDS.highest


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    assert next_limit(100, in_flight=40, load=EngineLoad(40, 0, 256), bounds=BOUNDS) == 100


def test_the_requests_of_others_make_room_too() -> None:
    shared = EngineLoad(num_running=64, num_waiting=100, capacity=64)
    assert next_limit(64, in_flight=64, load=shared, bounds=BOUNDS) < 64


def test_an_engine_that_does_not_say_changes_nothing() -> None:
    assert next_limit(100, in_flight=100, load=EngineLoad(), bounds=BOUNDS) == 100


def test_loads_of_several_engines_add_up() -> None:
    assert total_load([EngineLoad(1, 2, 3), EngineLoad(10, 20, 30)]) == EngineLoad(11, 22, 33)
    assert total_load([]) == EngineLoad()


async def test_the_controller_tells_only_changes_and_survives_silence() -> None:
    answers: list[EngineLoad | EngineError] = [EngineLoad(64, 200, 64), EngineError("gone"), EngineLoad(64, 3, 64)]
    told: list[int] = []

    async def look() -> EngineLoad:
        answer = answers.pop(0)
        if isinstance(answer, EngineError):
            raise answer
        return answer

    controller = ConcurrencyController(look, lambda: 264, told.append, BOUNDS, period_s=1.0)
    for _ in range(3):
        await controller.adjust()
    assert told == [264 - 97]
    assert controller.limit == 264 - 97


async def test_a_run_takes_no_more_than_its_engine_has_places_for(tmp_path: Path) -> None:
    engine = make_engine(latency=lambda request, _: 0.02)
    seen: list[int] = []

    async def crowded() -> EngineLoad:
        seen.append(engine.num_running)
        return EngineLoad(engine.num_running, max(0, engine.num_running - 8), 8)

    engine.load = crowded  # type: ignore[method-assign]
    config = make_config(tmp_path, concurrency="adaptive", max_steps=10, max_staleness=4)
    trainer = await run_toy(config, engine, [ToyEnv(engine)], concurrency_period_s=0.01)
    assert sorted(trainer.batches) == list(range(1, 11))
    assert min(seen[len(seen) // 2 :]) <= 12, "the limit never came down"
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


def test_a_limit_between_two_multiples_of_a_group_grows_all_the_same() -> None:
    """Groups start as a whole: of a limit of 12, groups of 8 can use 8."""
    limit = 12
    for _ in range(30):
        in_flight = limit // BOUNDS.lowest * BOUNDS.lowest
        limit = next_limit(limit, in_flight, engine_with(64, in_flight), BOUNDS)
    assert limit >= 64
