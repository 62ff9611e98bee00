"""A run in the abstract: real admission, line, ledger, state and outbox order; random timing, results and kills.

Rollouts are sampled by the version that is live while they run, so groups are as stale as they would be.
"""

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.staleness_policy import Outlook, StalenessPolicy, Verdict
from orchestrator.records.ledger import Ledger
from orchestrator.records.state import BatchState, load_state, resume, save_state
from orchestrator.values.group import STALE, AssembledBatch, FinalGroup, ScoredGroup, Ticket, check_staleness
from orchestrator.values.rollout import Rollout
from tests.orchestrator.builders import ENV_ERROR, make_rollout, make_ticket
from transport.wire.ledger import CompletedPositions

MAX_KILLS = 12
_ROLLOUTS = {version: make_rollout(version=version) for version in range(64)}


def kill(ledger: Ledger) -> None:
    """What the kernel does for a process that was killed: nothing is written, the file is closed."""
    os.close(ledger._descriptor)


@dataclass
class LineSimulation:
    """`kill_rate` is the chance of a kill -9 per event; `folder` is what survives it."""

    policy: StalenessPolicy
    max_in_flight: int
    sizes: tuple[int, ...]
    random: random.Random
    folder: Path
    kill_rate: float = 0.0
    live: int = 0
    outbox: list[AssembledBatch] = field(default_factory=list)
    """Durable batches."""
    num_kills: int = 0
    assembler: BatchAssembler = field(init=False)
    ledger: Ledger = field(init=False)
    done: CompletedPositions = field(init=False)
    running: dict[int, Ticket] = field(init=False)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        next_step = len(self.outbox) + 1
        self.done = resume(load_state(self.folder / "state.json"), next_step, run_id="run", order="order")
        self.ledger = Ledger(self.folder / "ledger.jsonl", self.done)
        self.assembler = BatchAssembler(self.policy, next_step, self.done)
        self.running = {}

    def outlook(self) -> Outlook:
        in_flight = sum(ticket.size for ticket in self.running.values())
        return self.assembler.outlook(self.live, self.max_in_flight - in_flight)

    def admit(self) -> bool:
        seq = self.assembler.tail
        ticket = make_ticket(seq, self.sizes[seq % len(self.sizes)], version=self.live)
        if self.policy.verdict(self.outlook(), ticket.size) is not Verdict.ADMIT:
            return False
        self.ledger.dispatched(ticket)
        self.assembler.dispatch(ticket)
        self.running[seq] = ticket
        return True

    def finish(self) -> bool:
        if not self.running:
            return False
        ticket = self.running.pop(self.random.choice(sorted(self.running)))
        kept = self.random.choice([0, ticket.size, ticket.size, self.random.randint(0, ticket.size)])
        began = self.random.randint(ticket.version, self.live)
        rollouts = (_ROLLOUTS[began],) * kept
        group = FinalGroup(ticket, (*rollouts, *[ENV_ERROR] * (ticket.size - kept)))
        self.assembler.add_final(ScoredGroup(group, (1.0,) * kept, None if kept else "no_survivors"))
        return True

    def ship(self) -> bool:
        if not self.assembler.complete:
            return False
        batch = self.assembler.complete.popleft()
        check_staleness(batch, self.policy.max_staleness)
        writes = self.random.randint(0, 3) if self._is_hit(self.kill_rate) else 3
        if writes >= 1:
            self.ledger.settled(batch)
            self.ledger.flush()
        if writes >= 2:
            save_state(self.folder / "state.json", BatchState.of("run", "order", batch.step, self.done, batch.done))
        if writes >= 3:
            self.outbox.append(batch)
            self.done = batch.done
        else:
            self._kill()
        return True

    def train(self) -> bool:
        if self.live == len(self.outbox):
            return False
        self.live += self.random.randint(1, len(self.outbox) - self.live)
        return True

    def _is_hit(self, rate: float) -> bool:
        """Whether a kill comes now; after `MAX_KILLS` none does, so that every run gets to its end."""
        return self.num_kills < MAX_KILLS and self.random.random() < rate

    def _kill(self) -> None:
        self.num_kills += 1
        kill(self.ledger)
        self._start()

    def run(self) -> None:
        """To the last batch; fails if nothing can happen before."""
        for _ in range(100_000):
            if len(self.outbox) == self.policy.max_steps:
                self.ledger.close()
                return
            if self._is_hit(self.kill_rate / 4):
                self._kill()
            events = [self.admit, self.finish, self.ship, self.train]
            self.random.shuffle(events)
            assert any(event() for event in events), f"locked up at {self.outlook()}"
        raise AssertionError("did not come to an end")

    def trained(self) -> Counter[int]:
        """How often each position was trained."""
        return Counter(group.seq for batch in self.outbox for group in batch.trained)

    def passed(self) -> Counter[int]:
        """How often each position is in a durable batch, for whatever reason."""
        return Counter(group.seq for batch in self.outbox for group in batch.groups)

    def num_stale(self) -> int:
        """Rollouts in durable batches that were thrown away for their age."""
        return sum(
            isinstance(result, Rollout)
            for batch in self.outbox
            for group in batch.groups
            if group.filtered == STALE
            for result in group.group.results
        )
