"""Curricula: what is drawn, that timing and kills do not change it, and what a run makes of it.

Weight functions of a user, found by import path.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.envs import CustomCurriculumConfig, DifficultyCurriculumConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.data.curriculum import (
    Curricula,
    Curriculum,
    ExampleStats,
    Float64s,
    Lesson,
    VisitOutcome,
    difficulty,
    draw,
    make_weights,
)
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.errors import CurriculumError, StateMismatchError
from orchestrator.records.history import HISTORY_NAME, History
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from orchestrator.values.group import AssembledBatch, FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import Rollout, RolloutFailure
from runtime.errors import UserError
from tests.orchestrator.builders import make_rollout
from tests.orchestrator.toys import ToyEnv, make_config, make_engine, run_orchestrator
from tests.support.fakes import FakeTrainer, training
from transport.wire.ledger import CompletedPositions, tally


def only_first(stats: ExampleStats, *, number: int) -> Float64s:
    """The first `number` examples and no others."""
    return (np.arange(len(stats.num_visits)) < number).astype(np.float64)


def raises(stats: ExampleStats) -> Float64s:
    """A bug of the user's."""
    raise KeyError("table")


def too_few(stats: ExampleStats) -> Float64s:
    """One number is missing."""
    return np.ones(len(stats.num_visits) - 1)


def nothing(stats: ExampleStats) -> Float64s:
    """No example is wanted."""
    return np.zeros(len(stats.num_visits))


def negative(stats: ExampleStats) -> Float64s:
    """Not a weight."""
    return np.where(stats.num_visits > 0, 1.0, -1.0)


HERE = "tests.orchestrator.data.test_curriculum"


def make_curriculum(num_examples: int = 12, refresh_groups: int = 4, seed: int = 0) -> Curriculum:
    weights = make_weights(DifficultyCurriculumConfig())
    return Curriculum("toy", num_examples, weights, seed=seed, refresh_groups=refresh_groups, memory=0.5)


def outcome_of(visit: int, example: int) -> VisitOutcome:
    """Some examples are easy, some are lost now and then, some change."""
    num_rollouts = 0 if (visit + example) % 7 == 0 else 4
    return VisitOutcome(visit, example, num_rollouts, num_rollouts * ((example % 5) / 4 + 0.1 * (visit % 3)))


def one_by_one(curriculum: Curriculum, number: int) -> list[int]:
    """The visits of a run in which nothing runs at the same time."""
    examples = []
    for visit in range(number):
        assert curriculum.is_ready(visit)
        examples.append(curriculum.example(visit))
        curriculum.saw(outcome_of(visit, examples[-1]))
    return examples


def lesson(curriculum: Curriculum, outcomes: list[VisitOutcome]) -> Lesson:
    """Through JSON, as in the history."""
    rounds = {outcome.visit // curriculum.refresh_groups for outcome in outcomes}
    tables = {number: tuple(curriculum.table(number).tolist()) for number in rounds}
    return msgspec.json.decode(msgspec.json.encode(Lesson(tables, tuple(outcomes))), type=Lesson)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_examples=st.integers(1, 30),
    refresh_groups=st.integers(1, 9),
    kill_rate=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_neither_timing_nor_kills_change_what_is_visited(
    seed: int, num_examples: int, refresh_groups: int, kill_rate: float
) -> None:
    number = 60
    make = partial(make_curriculum, num_examples, refresh_groups)
    expected = one_by_one(make(), number)
    chance = random.Random(seed)
    curriculum, tail, cursor = make(), 0, 0
    running: dict[int, int] = {}
    final: dict[int, VisitOutcome] = {}
    durable: list[Lesson] = []
    while cursor < number:
        event = chance.random()
        if event < kill_rate:
            curriculum, tail, running, final = make(), cursor, {}, {}
            for known in durable:
                curriculum.restore(dict(known.tables), known.outcomes)
        elif event < 0.5 and curriculum.is_ready(tail):
            running[tail] = curriculum.example(tail)
            assert running[tail] == expected[tail % number] or tail >= number
            tail += 1
        elif running:
            visit = chance.choice(sorted(running))
            final[visit] = outcome_of(visit, running.pop(visit))
            curriculum.saw(final[visit])
        while len(batch := [final[v] for v in range(cursor, cursor + 3) if v in final]) == 3:
            durable.append(lesson(curriculum, batch))
            cursor += 3


def test_a_round_waits_for_the_round_before_the_last() -> None:
    curriculum = make_curriculum(refresh_groups=4)
    for visit in range(8):
        assert curriculum.is_ready(visit), "two rounds need no outcomes"
        curriculum.example(visit)
    for visit in (7, 6, 5, 4, 3, 2, 1):
        curriculum.saw(outcome_of(visit, curriculum.example(visit)))
        assert not curriculum.is_ready(8)
    curriculum.saw(outcome_of(0, curriculum.example(0)))
    assert curriculum.is_ready(8)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.1, 1.0, 5.0]), min_size=1, max_size=40).filter(any),
    number=st.integers(1, 90),
    key=st.integers(),
)
def test_a_draw_is_complete_reproducible_and_without_what_is_not_wanted(
    weights: list[float], number: int, key: int
) -> None:
    column = np.array(weights)
    drawn = draw(column, number, "key", key)
    assert len(drawn) == number
    assert (column[drawn] > 0).all()
    assert (drawn == draw(column, number, "key", key)).all()
    if 2 * number <= np.count_nonzero(column):
        assert len(set(drawn.tolist())) == number, "an example was drawn twice"


def test_draws_follow_the_weights() -> None:
    weights = np.array([1.0] * 20 + [0.1] * 20)
    counts = Counter(int(index) for key in range(1000) for index in draw(weights, 4, key))
    heavy = sum(counts[index] for index in range(20))
    assert 0.85 < heavy / counts.total() < 0.95
    assert all(counts[index] for index in range(40)), "the floor keeps every example in the game"


def test_difficulty_prefers_the_target_and_the_unknown() -> None:
    stats = ExampleStats(
        num_visits=np.array([0, 1, 1, 1, 1, 2]),
        num_rollouts=np.array([0.0, 4.0, 4.0, 4.0, 4.0, 0.0]),
        mean_reward=np.array([np.nan, 0.5, 1.0, 0.75, 0.0, np.nan]),
    )
    weights = difficulty(stats, target=0.5, spread=0.5, floor=0.1)
    assert weights.tolist() == pytest.approx([1.0, 1.0, 0.1, 0.5, 0.1, 0.1])


@pytest.mark.parametrize(
    ("function", "problem"),
    [("raises", "KeyError: 'table'"), ("too_few", "shape"), ("nothing", "all 0"), ("negative", "not all finite")],
)
def test_a_function_that_breaks_its_contract_is_named(function: str, problem: str) -> None:
    weights = make_weights(CustomCurriculumConfig(import_path=f"{HERE}:{function}"))
    curriculum = Curriculum("toy", 5, weights, seed=0, refresh_groups=2, memory=0.5)
    with pytest.raises(CurriculumError, match=rf"{HERE}:{function}' of env 'toy'.*{problem}"):
        curriculum.example(0)


@pytest.mark.parametrize("path", ["no.such.module:f", f"{HERE}:no_such_function", f"{HERE}:only_first"])
def test_a_function_that_cannot_be_called_is_the_users_mistake(path: str) -> None:
    with pytest.raises(UserError, match=path):
        make_weights(CustomCurriculumConfig(import_path=path))


def scored(visit: int, rewards: list[float], filtered: str | None = None) -> ScoredGroup:
    results = tuple(make_rollout(reward, env_name="toy") for reward in rewards)
    group = FinalGroup(Ticket(GroupKey("toy", "0", visit), visit, len(results), False, 0), results)
    return ScoredGroup(group, (0.0,) * len(results), filtered)


def test_only_groups_that_no_failure_dropped_have_an_outcome() -> None:
    curricula = Curricula({"toy": make_curriculum()})
    groups = [
        scored(0, [0.0, 1.0]),
        scored(1, [1.0, 1.0], "zero_signal"),
        scored(2, [0.5, 0.25], "stale"),
        scored(3, [1.0], "partial_group"),
    ]
    outcomes = curricula.lessons(groups)["toy"].outcomes
    assert [(seen.num_rollouts, seen.total_reward) for seen in outcomes] == [(2, 1.0), (2, 2.0), (2, 0.75), (0, 0)]


def test_a_history_that_is_lost_is_not_made_up_for(tmp_path: Path) -> None:
    curricula = Curricula({"toy": make_curriculum()})
    history = History(tmp_path / HISTORY_NAME, 1, curricula)
    history.write(AssembledBatch(1, (scored(0, [0.0, 1.0]),), CompletedPositions(1)))
    History(tmp_path / HISTORY_NAME, 2, Curricula({"toy": make_curriculum()}))
    (tmp_path / HISTORY_NAME).unlink()
    with pytest.raises(StateMismatchError, match="ends with batch 0, the run with 1"):
        History(tmp_path / HISTORY_NAME, 2, Curricula({"toy": make_curriculum()}))


class HalfEasyEnv(ToyEnv):
    """Even examples are always solved; odd ones half of the time. `stop` is set once `stop_at` is live."""

    def __init__(self, engine: ScriptedEngine, stop: asyncio.Event | None = None, stop_at: int = 0) -> None:
        super().__init__(engine, num_examples=16)
        self._stop, self._stop_at, self._scripted = stop, stop_at, engine

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        if self._stop is not None and self._scripted.weights.version >= self._stop_at:
            self._stop.set()
        (result,) = await super().run(request)
        assert isinstance(result, Rollout)
        return [result if request.example.payload % 2 else msgspec.structs.replace(result, reward=1.0)]


def curriculum_config(folder: Path, **changes: Any) -> OrchestratorConfig:
    env = {"id": "toy", "group_size": 4, "sampling": {"max_tokens": 6}}
    curriculum = {"type": "difficulty", "refresh_groups": 8, "floor": 0.05}
    return make_config(folder, envs=[env | {"curriculum": curriculum}], **({"max_steps": 20} | changes))


def visited(env: ToyEnv) -> list[int]:
    """Payloads in the order of dispatch."""
    return [request.example.payload for request in env.requests if request.index == 0]


def run_in_two_parts(config: OrchestratorConfig, stop_at: int) -> FakeTrainer:
    """Stop at version `stop_at`, then go on with everything new."""
    with training(FakeTrainer(config.server.endpoint)) as trainer:
        engine, restarted, stop = make_engine(), make_engine(), asyncio.Event()
        asyncio.run(run_orchestrator(config, engine, [HalfEasyEnv(engine, stop, stop_at)], stop))
        assert len(trainer.batches) < config.max_steps
        asyncio.run(run_orchestrator(config, restarted, [HalfEasyEnv(restarted)]))
    return trainer


def test_a_run_turns_to_the_examples_that_have_signal_and_resumes_with_the_same_draws(tmp_path: Path) -> None:
    trainer = run_in_two_parts(curriculum_config(tmp_path / "parts", max_staleness=0), stop_at=4)
    whole = curriculum_config(tmp_path / "whole", max_staleness=0)
    engine = make_engine()
    env = HalfEasyEnv(engine)
    with training(FakeTrainer(whole.server.endpoint)) as reference:
        asyncio.run(run_orchestrator(whole, engine, [env]))
    assert trainer.digests == reference.digests
    odd = [payload % 2 for payload in visited(env)]
    assert sum(odd[-20:]) > sum(odd[:20]), "examples without signal are still visited as often"


def test_a_curriculum_goes_with_completion_order(tmp_path: Path) -> None:
    trainer = run_in_two_parts(curriculum_config(tmp_path, staleness_policy="drop"), stop_at=4)
    ids = Counter(sample.trajectory_id for samples in trainer.batches.values() for sample in samples)
    assert set(ids.values()) == {1}
    assert sorted(trainer.batches) == list(range(1, 21))
    ledger = tally(read_ledger(tmp_path / "toy" / "ledger" / LEDGER_NAME))
    assert ledger.balances, ledger.problems


def test_a_curriculum_cannot_be_turned_on_in_the_middle_of_a_run(tmp_path: Path) -> None:
    plain = make_config(tmp_path, max_steps=2)
    engine = make_engine()
    with training(FakeTrainer(plain.server.endpoint)):
        asyncio.run(run_orchestrator(plain, engine, [ToyEnv(engine)]))
    changed = curriculum_config(tmp_path, max_steps=4)
    with pytest.raises(UserError, match="curriculum in rounds of 8"):
        asyncio.run(run_orchestrator(changed, engine, [ToyEnv(engine)]))


def test_a_custom_curriculum_is_obeyed(tmp_path: Path) -> None:
    env_config = {
        "id": "toy",
        "group_size": 4,
        "sampling": {"max_tokens": 6},
        "curriculum": {"type": "custom", "import_path": f"{HERE}:only_first", "kwargs": {"number": 3}},
    }
    config = make_config(tmp_path, envs=[env_config])
    engine = make_engine()
    env = ToyEnv(engine)
    with training(FakeTrainer(config.server.endpoint)):
        asyncio.run(run_orchestrator(config, engine, [env]))
    assert set(visited(env)) == {0, 1, 2}
    assert len({request.group_id for request in env.requests}) == len(visited(env)), "a visit is its own group"
