"""The staleness policies: bound, progress, and kill -9 at any instant, on the real bookkeeping."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.staleness_policy import (
    DropPolicy,
    Outlook,
    StalenessPolicy,
    Verdict,
    WaitPolicy,
    make_policy,
)
from orchestrator.records.ledger import read_ledger
from orchestrator.values.group import ScoredGroup
from tests.orchestrator.batches.batch_simulation import LineSimulation
from tests.orchestrator.builders import make_group, make_ticket
from tests.orchestrator.toys import make_config
from transport.wire.ledger import CompletedPositions, tally

POLICIES: dict[str, type[StalenessPolicy]] = {"wait": WaitPolicy, "drop": DropPolicy}


def simulate(policy: str, seed: int, folder: Path, *, kill_rate: float = 0.0, **limits: Any) -> LineSimulation:
    sizes = limits.pop("sizes", (4,))
    values = {"batch_size": 16, "max_staleness": 2, "max_in_flight": 64, "max_steps": 12} | limits
    max_in_flight = values.pop("max_in_flight")
    chosen = POLICIES[policy](largest_group=max(sizes), **values)
    simulation = LineSimulation(chosen, max_in_flight, tuple(sizes), random.Random(seed), folder, kill_rate)
    simulation.run()
    return simulation


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(1, 30),
    max_staleness=st.integers(0, 4),
    slots=st.integers(0, 60),
    kill_rate=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_under_every_policy_staleness_is_bounded_nothing_locks_up_and_no_kill_loses_or_repeats_a_position(
    policy: str, seed: int, sizes: list[int], batch_size: int, max_staleness: int, slots: int, kill_rate: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(  # every batch is checked for its staleness, and lock-ups fail
            policy,
            seed,
            Path(folder),
            kill_rate=kill_rate,
            sizes=sizes,
            batch_size=batch_size,
            max_staleness=max_staleness,
            max_in_flight=max(sizes) + slots,
        )
        result = tally(read_ledger(Path(folder) / "ledger.jsonl"))
    assert result.balances, result.problems
    assert max(run.passed().values()) == 1, "a position is in two batches"
    assert {seq for seq in run.passed() if seq not in run.done} == set(), "the state forgot a position"
    assert sum(run.passed().values()) == run.done.cursor + sum(end - first for first, end in run.done.beyond)
    for batch in run.outbox:
        num_rollouts = sum(group.num_trainable for group in batch.groups)
        assert result.states[f"trained@{batch.step}"] == num_rollouts >= batch_size
    assert result.states["stale"] == run.num_stale()
    assert policy == "drop" or not run.num_stale(), "only `drop` throws away"
    assert policy != "wait" or not run.done.beyond, "dispatch order has no holes"


def test_the_simulation_sees_kills_holes_and_stale_groups(tmp_path: Path) -> None:
    runs = []
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        runs.append(simulate("drop", seed, folder, kill_rate=0.2, max_staleness=0))
    assert sum(run.num_kills for run in runs) > 8
    assert sum(run.num_stale() for run in runs) > 0
    assert any(batch.done.beyond for run in runs for batch in run.outbox)


def finished(line: BatchAssembler, seq: int, num_trainable: int = 2, version: int = 0) -> None:
    rewards = [0.0, 1.0] if num_trainable else [1.0, 1.0]
    filtered = None if num_trainable else "zero_signal"
    line.add_final(ScoredGroup(make_group(rewards, seq, version=version), (-1.0, 1.0), filtered))


def test_drop_ships_what_finishes_first_and_throws_away_what_is_too_old() -> None:
    line = BatchAssembler(DropPolicy(2, 2, 2, max_steps=10), next_step=3, done=CompletedPositions(10))
    for seq in range(10, 13):
        line.dispatch(make_ticket(seq))
    finished(line, 12)
    (batch,) = line.complete
    assert (batch.step, batch.done) == (3, CompletedPositions(10, ((12, 13),)))
    finished(line, 11)  # of version 0: staleness 3 in batch 4
    assert (line.next_step, line.pending_rollouts, line.pending_groups, len(line)) == (4, 2, 1, 2)
    line.dispatch(make_ticket(13, version=1))
    finished(line, 13, version=1)
    assert [(group.seq, group.filtered) for group in line.complete[1].groups] == [(11, "stale"), (13, None)]
    assert line.complete[1].done == CompletedPositions(10, ((11, 14),))


def test_a_restarted_line_steps_over_what_is_done() -> None:
    for policy in (WaitPolicy(4, 2, 9, max_steps=10), DropPolicy(4, 2, 9, max_steps=10)):
        line = BatchAssembler(policy, 3, DONE)
        tails = []
        for _ in range(4):
            tails.append(line.tail)
            line.dispatch(make_ticket(line.tail))
        assert tails == [5, 7, 10, 11]
        for seq in (7, 10, 5):
            finished(line, seq)
        assert line.complete[0].done == (
            CompletedPositions(10) if isinstance(policy, WaitPolicy) else CompletedPositions(5, ((6, 11),))
        )


DONE = CompletedPositions(5, ((6, 7), (8, 10)))


def test_drop_admits_what_could_be_in_time_and_wait_what_must_be() -> None:
    limits = {"batch_size": 8, "largest_group": 4, "max_staleness": 1, "max_steps": 10}
    outlook = Outlook(next_step=2, pending_rollouts=8, pending_groups=2, live_version=0, free_slots=92)
    assert WaitPolicy(**limits).verdict(outlook, 4) is Verdict.TOO_STALE
    drop = DropPolicy(**limits)
    assert drop.verdict(outlook, 4) is Verdict.ADMIT
    late = Outlook(next_step=3, pending_rollouts=0, pending_groups=0, live_version=0, free_slots=92)
    assert drop.verdict(late, 4) is Verdict.TOO_STALE
    assert drop.needed_version(late) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_config_chooses_the_policy(tmp_path: Path, policy: str) -> None:
    config = make_config(tmp_path, staleness_policy=policy)
    expected = POLICIES[policy](config.batch_size, config.largest_group, config.max_staleness, config.max_steps)
    assert make_policy(config) == expected
