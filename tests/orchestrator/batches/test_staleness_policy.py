"""The staleness policies: bound, progress, and kill -9 at any instant, on the real bookkeeping.

Admission and the line of groups, together: the staleness bound holds and nothing locks up, whatever the timing.
"""

import random
import tempfile
from dataclasses import dataclass, field
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
from orchestrator.errors import InvariantError
from orchestrator.records.ledger import read_ledger
from orchestrator.values.group import AssembledBatch, ScoredGroup
from tests.orchestrator.batches.batch_simulation import LineSimulation
from tests.orchestrator.builders import make_group, make_scored, make_ticket
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


@dataclass
class Simulation:
    """Random finishing order, random failures and filters, a trainer that publishes when it likes."""

    policy: StalenessPolicy
    max_in_flight: int
    sizes: tuple[int, ...]
    random: random.Random
    assembler: BatchAssembler = field(init=False)
    live: int = 0
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    admitted_at: dict[int, int] = field(default_factory=dict)
    shipped: list[AssembledBatch] = field(default_factory=list)
    most_outstanding: int = 0

    def __post_init__(self) -> None:
        self.assembler = BatchAssembler(self.policy, next_step=1, done=CompletedPositions())

    def outlook(self) -> Outlook:
        in_flight = sum(size for size, _ in self.running.values())
        return self.assembler.outlook(self.live, self.max_in_flight - in_flight)

    def size_at(self, seq: int) -> int:
        return self.sizes[seq % len(self.sizes)]

    def admit(self) -> bool:
        seq = self.assembler.tail
        size = self.size_at(seq)
        if self.policy.verdict(self.outlook(), size) is not Verdict.ADMIT:
            return False
        self.assembler.dispatch(make_ticket(seq, size))
        self.running[seq] = (size, self.live)
        self.admitted_at[seq] = self.live
        return True

    def finish(self) -> bool:
        if not self.running:
            return False
        seq = self.random.choice(sorted(self.running))
        size, _ = self.running.pop(seq)
        kept = self.random.choice([0, size, size, self.random.randint(0, size)])
        self.assembler.add_final(make_scored(kept, seq, size))
        return True

    def train(self) -> bool:
        if self.live == self.assembler.next_step - 1:
            return False
        self.live += self.random.randint(1, self.assembler.next_step - 1 - self.live)
        return True

    def step(self) -> bool:
        """One random event; false if nothing at all can happen."""
        events = [self.admit, self.finish, self.train]
        self.random.shuffle(events)
        happened = any(event() for event in events)
        while self.assembler.complete:
            self.shipped.append(self.assembler.complete.popleft())
        num_untrained = self.assembler.next_step - 1 - self.live
        outstanding = self.assembler.pending_rollouts + self.policy.batch_size * num_untrained
        self.most_outstanding = max(self.most_outstanding, outstanding)
        return happened

    def run(self) -> None:
        for _ in range(100_000):
            if len(self.shipped) == self.policy.max_steps:
                return
            assert self.step(), f"locked up at {self.outlook()}"
        raise AssertionError("did not come to an end")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    batch_size=st.integers(1, 30),
    max_staleness=st.integers(0, 4),
    slots=st.integers(0, 60),
)
def test_staleness_stays_bounded_and_nothing_locks_up(
    seed: int, sizes: list[int], batch_size: int, max_staleness: int, slots: int
) -> None:
    policy = WaitPolicy(batch_size, max(sizes), max_staleness, max_steps=12)
    simulation = Simulation(policy, max(sizes) + slots, tuple(sizes), random.Random(seed))
    simulation.run()
    for batch in simulation.shipped:
        oldest = min(simulation.admitted_at[group.seq] for group in batch.trained)
        assert (batch.step - 1) - oldest <= max_staleness
        assert sum(group.num_trainable for group in batch.trained) >= batch_size
    positions = [group.seq for batch in simulation.shipped for group in batch.groups]
    assert positions == list(range(len(positions))), "dispatch order, nothing lost, nothing twice"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 3))
def test_outstanding_rollouts_are_bounded(seed: int, max_staleness: int) -> None:
    policy = WaitPolicy(16, 4, max_staleness, max_steps=12)
    simulation = Simulation(policy, 1000, (4,), random.Random(seed))
    simulation.run()
    assert simulation.most_outstanding < (max_staleness + 1) * 16 + 4


def test_a_synchronous_run_admits_exactly_one_batch_per_version() -> None:
    policy = WaitPolicy(batch_size=8, largest_group=4, max_staleness=0, max_steps=10)
    simulation = Simulation(policy, 100, (4,), random.Random(0))
    assert [simulation.admit() for _ in range(3)] == [True, True, False]
    assert policy.verdict(simulation.outlook(), 4) is Verdict.TOO_STALE
    for seq in (0, 1):
        simulation.assembler.add_final(make_scored(4, seq, 4))
        simulation.running.pop(seq)
    assert not simulation.admit(), "batch 1 is cut but version 1 is not live"
    simulation.live = 1
    assert simulation.admit()


def test_a_filtered_group_is_backfilled_within_its_own_version() -> None:
    policy = WaitPolicy(batch_size=8, largest_group=4, max_staleness=0, max_steps=10)
    simulation = Simulation(policy, 100, (4,), random.Random(0))
    while simulation.admit():
        pass
    simulation.running.pop(1)
    simulation.assembler.add_final(make_scored(0, 1, 4))
    assert simulation.admit()
    assert not simulation.admit()


def test_slots_and_the_last_step_limit_admission() -> None:
    policy = WaitPolicy(batch_size=8, largest_group=4, max_staleness=9, max_steps=2)
    assert policy.verdict(Outlook(1, 8, 2, 0, free_slots=10 - 6), 4) is Verdict.ADMIT
    assert policy.verdict(Outlook(1, 8, 2, 0, free_slots=10 - 7), 4) is Verdict.NO_SLOT
    assert policy.verdict(Outlook(1, 16, 4, 0, free_slots=10), 4) is Verdict.ENOUGH
    assert policy.verdict(Outlook(3, 0, 0, 0, free_slots=10), 4) is Verdict.ENOUGH


def test_whole_groups_are_counted_where_they_do_not_divide_the_batch() -> None:
    policy = WaitPolicy(batch_size=10, largest_group=8, max_staleness=0, max_steps=10)
    assert policy.latest_step(Outlook(1, 16, 2, 0, 0)) == 2
    assert policy.latest_step(Outlook(1, 24, 3, 0, 0)) == 2, "two groups fill a batch, the third joins the next"


def num_complete(sizes: list[int], batch_size: int) -> int:
    """Batches that groups of these sizes complete, in their order."""
    complete = rollouts = 0
    for size in sizes:
        rollouts += size
        if rollouts >= batch_size:
            complete, rollouts = complete + 1, 0
    return complete


@given(
    results=st.lists(
        st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size))), max_size=40
    ),
    batch_size=st.integers(1, 30),
)
def test_groups_ahead_complete_no_more_batches_than_the_bound(results: list[tuple[int, int]], batch_size: int) -> None:
    sizes, kept = [size for size, _ in results], [kept for _, kept in results]
    largest = max(sizes, default=1)
    outlook = Outlook(1, sum(sizes), len(sizes), 0, 0)
    bound = WaitPolicy(batch_size, largest, 0, max_steps=10).latest_step(outlook) - 1
    assert num_complete(kept, batch_size) <= num_complete(sizes, batch_size) <= bound
    equal = Outlook(1, largest * len(sizes), len(sizes), 0, 0)
    exact = WaitPolicy(batch_size, largest, 0, max_steps=10).latest_step(equal) - 1
    assert exact == num_complete([largest] * len(sizes), batch_size), "with groups of one size it is reached"


@pytest.mark.parametrize(("sizes", "batch_size", "latest"), [([8, 8, 8], 10, 2), ([4, 1, 1, 1], 8, 1)])
def test_neither_rollouts_nor_groups_alone_give_the_bound(sizes: list[int], batch_size: int, latest: int) -> None:
    policy = WaitPolicy(batch_size, max(sizes), 0, max_steps=10)
    assert policy.latest_step(Outlook(1, sum(sizes), len(sizes), 0, 0)) == latest


def test_batches_wait_for_the_head_of_the_line() -> None:
    assembler = BatchAssembler(WaitPolicy(4, 2, 9, max_steps=10), next_step=3, done=CompletedPositions(10))
    for seq in range(10, 14):
        assembler.dispatch(make_ticket(seq, 2))
    assert assembler.add_final(make_scored(2, 11, 2)) == []
    assert assembler.add_final(make_scored(2, 12, 2)) == []
    assert not assembler.complete
    passed = assembler.add_final(make_scored(0, 10, 2))
    assert [group.seq for group in passed] == [10, 11, 12]
    batch = assembler.complete.popleft()
    assert (batch.step, batch.done) == (3, CompletedPositions(13))
    assert [group.seq for group in batch.groups] == [10, 11, 12]
    assert [group.seq for group in batch.trained] == [11, 12]
    assert (assembler.next_step, assembler.pending_groups, assembler.pending_rollouts, len(assembler)) == (4, 1, 2, 1)


def test_the_line_refuses_strangers() -> None:
    assembler = BatchAssembler(WaitPolicy(4, 2, 9, max_steps=10), next_step=1, done=CompletedPositions(5))
    with pytest.raises(InvariantError, match="expected 5"):
        assembler.dispatch(make_ticket(6, 2))
    assembler.dispatch(make_ticket(5, 2))
    assembler.dispatch(make_ticket(6, 2))
    assembler.add_final(make_scored(2, 6, 2))
    for seq in (6, 7, 4):
        with pytest.raises(InvariantError, match=f"position {seq}"):
            assembler.add_final(make_scored(2, seq, 2))
