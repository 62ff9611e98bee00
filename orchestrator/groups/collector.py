"""`Collector`: takes rollouts as they come back and gives final groups to the assembler of batches.

The "groups" loop of the table in `orchestrator.py`: it has no task of its own, the last member of a group drives it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loguru import logger

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.errors import InvariantError
from orchestrator.groups.scoring import FailureGuard, GroupRule, SignalGuard, score
from orchestrator.records.ledger import Ledger
from orchestrator.values.group import STALE, FinalGroup, GroupKey, ScoredGroup, Ticket
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure


class Collector:
    """Owns open groups. `on_final` is called after every final group, `observe` with it before it goes to the
    assembler. Raises what the guards raise."""

    def __init__(
        self,
        assembler: BatchAssembler,
        ledger: Ledger,
        rules: Mapping[str, GroupRule],
        failure_guard: FailureGuard,
        signal_guard: SignalGuard,
        on_final: Callable[[], None],
        observe: Callable[[ScoredGroup], None] = lambda _: None,
    ) -> None:
        self.assembler = assembler
        self._ledger = ledger
        self._rules = rules
        self._failure_guard = failure_guard
        self._signal_guard = signal_guard
        self._on_final = on_final
        self._observe = observe
        self._groups = GroupBuffer()

    def dispatched(self, ticket: Ticket) -> None:
        """A group is about to start."""
        self._ledger.dispatched(ticket)
        self._groups.open(ticket)
        self.assembler.dispatch(ticket)

    def retry(self, ticket: Ticket, index: int, failure: RolloutFailure) -> None:
        """A try failed and is about to be made again: a new dispatch. The failure is logged here, once."""
        _log_failure(ticket, index, failure, "failed and is run again")
        self._groups.retry(ticket.key, index, failure)
        self._ledger.retried(ticket, index, failure)
        self._failure_guard.saw_try(ticket.key.env_name, failure)

    def record(self, ticket: Ticket, index: int, result: Rollout | RolloutFailure) -> None:
        """A rollout came back. Its failure is logged here, once."""
        if isinstance(result, RolloutFailure):
            _log_failure(ticket, index, result, "failed")
        group = self._groups.record(ticket.key, index, result)
        if group is not None:
            self._finish(group)

    def _finish(self, group: FinalGroup) -> None:
        scored = score(group, self._rules[group.ticket.key.env_name])
        _log_counts(scored)
        self._observe(scored)
        for passed in self.assembler.add_final(scored):
            self._signal_guard.saw(passed)
            if passed.filtered == STALE:
                logger.debug("group {} is too old for the batch: thrown away", passed.id)
        self._on_final()
        self._failure_guard.saw(scored)


def _log_failure(ticket: Ticket, index: int, failure: RolloutFailure, what: str) -> None:
    level = "DEBUG" if failure.reason is FailureReason.CANCELLED else "WARNING"
    logger.log(level, "rollout {}#{} {}: {}: {}", ticket.key.id, index, what, failure.reason.value, failure.message)


def _log_counts(scored: ScoredGroup) -> None:
    group = scored.group
    lost = Counter(failure.reason.value for _, failure in (*group.failed_tries, *group.failures))
    logger.log(
        "INFO" if lost else "DEBUG",
        "group {} is final: {} of {} rollouts came back{}, {} can be trained{}",
        group.ticket.key.id,
        len(group.survivors),
        group.num_dispatched,
        f" ({', '.join(f'{count} {reason}' for reason, count in sorted(lost.items()))})" if lost else "",
        scored.num_trainable,
        f" ({scored.filtered})" if scored.filtered else "",
    )


@dataclass(slots=True)
class _OpenGroup:
    ticket: Ticket
    results: dict[int, Rollout | RolloutFailure] = field(default_factory=dict)
    failed_tries: list[tuple[int, RolloutFailure]] = field(default_factory=list)


class GroupBuffer:
    """Groups that still wait for members, by key."""

    def __init__(self) -> None:
        self._open: dict[GroupKey, _OpenGroup] = {}

    def open(self, ticket: Ticket) -> None:
        """Begin to collect a group that was dispatched."""
        if ticket.key in self._open:
            raise InvariantError(f"group {ticket.key.id} was dispatched while it is still open")
        self._open[ticket.key] = _OpenGroup(ticket)

    def retry(self, key: GroupKey, index: int, failure: RolloutFailure) -> None:
        """A try of one member failed and is made again: the member is still awaited."""
        self._awaiting(key, index).failed_tries.append((index, failure))

    def record(self, key: GroupKey, index: int, result: Rollout | RolloutFailure) -> FinalGroup | None:
        """Account for one member; the final group if it was the last."""
        group = self._awaiting(key, index)
        group.results[index] = result
        if len(group.results) < group.ticket.size:
            return None
        del self._open[key]
        results = tuple(group.results[member] for member in range(group.ticket.size))
        return FinalGroup(group.ticket, results, tuple(group.failed_tries))

    def _awaiting(self, key: GroupKey, index: int) -> _OpenGroup:
        group = self._open.get(key)
        if group is None or not 0 <= index < group.ticket.size or index in group.results:
            raise InvariantError(f"rollout {key.id}#{index} came back but is not awaited")
        return group
