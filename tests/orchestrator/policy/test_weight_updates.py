"""The live version: announced, applied, verified; a failure leaves the old one in service.

The number of rollouts follows the load of the engines.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.engines.protocol import EngineError, EngineLoad, total_load
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.policy import weight_updates as policy_module
from orchestrator.policy.concurrency import Bounds, ConcurrencyController, next_limit
from orchestrator.policy.weight_updates import WeightUpdates
from runtime.errors import PeerLostError, UserError
from runtime.health.health import Health
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_toy
from tests.support.waiting import until_async
from transport.backoff import Backoff
from transport.changes import Changes
from transport.outbox.progress import PublishedWeights
from transport.wire.generation import ServedWeights


class Announcements:
    """What `WeightUpdates` reads of a `BatchServer`."""

    def __init__(self, weights: PublishedWeights | None = None) -> None:
        self.weights = weights
        self._changes = Changes()

    def announce(self, version: int) -> None:
        self.weights = published(version)
        self._changes.notify()

    async def wait_weights(self, seen: PublishedWeights | None, timeout_s: float | None = None) -> PublishedWeights:
        await self._changes.wait_for(lambda: self.weights not in (None, seen))
        return self.weights


class FlakyEngine(ScriptedEngine):
    """Refuses, disagrees or hangs as told; remembers which versions it was asked for."""

    def __init__(self, weights: ServedWeights | None = None) -> None:
        super().__init__(16, 0, weights=weights)
        self.asked: list[int] = []
        self.num_refusals = 0
        self.before_apply: Callable[[], None] = lambda: None
        self.hangs = False
        self.disagrees = False

    async def apply_weights(self, location: str, version: int, digest: str) -> None:
        self.asked.append(version)
        self.before_apply()
        if self.hangs:
            await asyncio.Event().wait()
        if self.num_refusals:
            self.num_refusals -= 1
            raise EngineError("the shard is torn")
        await super().apply_weights(location, version, digest)
        self.disagrees = False

    async def served(self) -> ServedWeights:
        if self.disagrees:
            raise EngineError("the engines serve versions 0 and 3")
        return await super().served()


def published(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, location=f"v{version}", digest=f"digest-{version}")


def make_policy(engine: FlakyEngine, source: Announcements, live: list[int] | None = None) -> WeightUpdates:
    """`live` collects the version at each call of `on_live`."""
    seen = [] if live is None else live
    policy = WeightUpdates(
        engine, source, Health("orchestrator", 60), update_timeout_s=0.2, on_live=lambda: seen.append(policy.live)
    )
    return policy


async def follow(policy: WeightUpdates, condition: Callable[[], bool]) -> None:
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(policy.run())
        await until_async(condition, 20)
        loop.cancel()


async def start(policy: WeightUpdates, newest_batch: int = 10, timeout_s: float = 5.0) -> None:
    await policy.start(newest_batch=newest_batch, timeout_s=timeout_s)


async def test_engines_are_told_what_is_live_even_if_they_serve_it() -> None:
    """A pool needs to know where the weights lie, for an engine that comes back later."""
    engine = FlakyEngine(ServedWeights(version=3, digest="digest-3"))
    policy = make_policy(engine, Announcements(published(3)))
    await start(policy)
    assert (policy.live, engine.asked) == (3, [3])


async def test_a_restarted_engine_gets_the_announced_version_before_anything_else() -> None:
    engine = FlakyEngine()
    policy = make_policy(engine, Announcements(published(3)))
    await start(policy)
    assert (policy.live, engine.asked, engine.weights.version) == (3, [3], 3)


async def test_another_digest_of_the_same_version_is_replaced() -> None:
    engine = FlakyEngine(ServedWeights(version=3, digest="of another lineage"))
    policy = make_policy(engine, Announcements(published(3)))
    await start(policy)
    assert engine.asked == [3]


async def test_engines_that_disagree_all_get_the_announced_version() -> None:
    engine = FlakyEngine()
    engine.disagrees = True
    policy = make_policy(engine, Announcements(published(3)))
    await start(policy)
    assert (policy.live, engine.asked) == (3, [3])


async def test_a_version_whose_announcement_was_lost_is_kept_but_not_counted() -> None:
    engine = FlakyEngine(ServedWeights(version=4, digest="digest-4"))
    policy = make_policy(engine, Announcements(published(3)))
    await start(policy)
    assert (policy.live, engine.asked) == (3, [])


async def test_weights_of_another_run_are_refused() -> None:
    engine = FlakyEngine(ServedWeights(version=4, digest="x"))
    with pytest.raises(UserError, match="serve version 4 but the run has only made 0 batches"):
        await start(make_policy(engine, Announcements()), newest_batch=0)


async def test_engines_that_never_take_the_weights_end_the_start() -> None:
    engine = FlakyEngine()
    engine.num_refusals = 1000
    with pytest.raises(PeerLostError, match=r"within 0\.3 s"):
        await start(make_policy(engine, Announcements(published(1))), timeout_s=0.3)


async def test_engines_that_disagree_without_an_announcement_end_the_start() -> None:
    engine = FlakyEngine()
    engine.disagrees = True
    with pytest.raises(PeerLostError, match="versions 0 and 3"):
        await start(make_policy(engine, Announcements()))


async def test_a_refused_version_is_retried_and_the_old_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "BACKOFF", Backoff(0.01, 10.0))
    engine, source, live = FlakyEngine(), Announcements(), list[int]()
    policy = make_policy(engine, source, live)
    engine.num_refusals = 3
    versions_while_trying = []
    engine.before_apply = lambda: versions_while_trying.append(policy.live)
    source.announce(1)
    await follow(policy, lambda: policy.live == 1)
    assert versions_while_trying == [0, 0, 0, 0]
    assert live == [1]


async def test_versions_in_between_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "BACKOFF", Backoff(0.01, 10.0))
    engine, source = FlakyEngine(), Announcements()
    policy = make_policy(engine, source)
    engine.num_refusals = 1
    engine.before_apply = lambda: source.announce(5)
    source.announce(1)
    await follow(policy, lambda: policy.live == 5)
    assert engine.asked == [1, 5]


async def test_an_engine_that_hangs_is_given_up_after_its_deadline() -> None:
    engine, source = FlakyEngine(), Announcements()
    policy = make_policy(engine, source)
    engine.hangs = True
    source.announce(1)
    await follow(policy, lambda: len(engine.asked) >= 2)
    assert policy.live == 0


async def test_health_says_which_engine_holds_up_a_version_and_why() -> None:
    engine, source, health = FlakyEngine(), Announcements(), Health("orchestrator", 60)
    policy = WeightUpdates(engine, source, health, update_timeout_s=0.2, on_live=lambda: None)
    engine.num_refusals = 3
    source.announce(1)
    said = []
    await follow(policy, lambda: said.append(health.waits) or policy.live == 1)
    assert "policy: the engines to serve version 1 (the shard is torn)" in said
    assert health.waits == ""


async def test_the_end_of_an_outage_ends_the_pause_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "BACKOFF", Backoff(1000.0, 1000.0))
    engine, source = FlakyEngine(), Announcements()
    policy = make_policy(engine, source)
    engine.num_refusals = 1
    engine.availability.lost("killed")
    source.announce(1)

    def is_over() -> bool:
        if engine.asked:
            engine.availability.restored()
        return policy.live == 1

    await follow(policy, is_over)
    assert engine.asked == [1, 1]


async def test_engines_that_fail_while_the_policy_starts_are_brought_back() -> None:
    engine = FlakyEngine()
    engine.num_refusals = 1000

    async def keep_in_service() -> None:
        engine.num_refusals = 0
        await asyncio.Event().wait()

    engine.keep_in_service = keep_in_service
    policy = make_policy(engine, Announcements(published(1)))
    await start(policy)
    assert policy.live == 1
    assert len(asyncio.all_tasks()) == 1, "an orphan task is left"


async def test_engines_are_kept_in_service_while_the_policy_runs() -> None:
    engine = FlakyEngine()
    was_called = asyncio.Event()

    async def keep_in_service() -> None:
        was_called.set()

    engine.keep_in_service = keep_in_service
    await follow(make_policy(engine, Announcements()), was_called.is_set)


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
