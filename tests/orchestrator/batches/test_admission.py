"""Admission and the line of groups, together: the staleness bound holds and nothing locks up, whatever the timing."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.staleness_policy import Outlook, StalenessPolicy, Verdict, WaitPolicy
from orchestrator.errors import InvariantError
from orchestrator.values.batch import AssembledBatch
from tests.orchestrator.builders import make_scored, make_ticket
from transport.wire.ledger import CompletedPositions


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
