"""`Collector`: takes rollouts as they come back and puts final groups into the line, from where batches are cut.

The "groups" loop of the table in `orchestrator.py`: it has no task of its own, the last member of a group drives it.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from loguru import logger

from orchestrator.failure_guard import FailureGuard
from orchestrator.filters import STALE, ScoredGroup, SignalGuard, score
from orchestrator.group_rule import GroupRule
from orchestrator.groups import FinalGroup, GroupBuffer, Ticket
from orchestrator.ledger import Ledger
from orchestrator.lineup import Lineup
from orchestrator.rollout import Failure, FailureReason, Rollout


class Collector:
    """Owns open groups and the line. `on_final` is called after every final group, `observe` with it before it goes
    into the line. Raises what the guards raise."""

    def __init__(
        self,
        lineup: Lineup,
        ledger: Ledger,
        rules: Mapping[str, GroupRule],
        failure_guard: FailureGuard,
        signal_guard: SignalGuard,
        on_final: Callable[[], None],
        observe: Callable[[ScoredGroup], None] = lambda _: None,
    ) -> None:
        self.lineup = lineup
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
        self.lineup.dispatch(ticket)

    def retry(self, ticket: Ticket, index: int, failure: Failure) -> None:
        """A try failed and is about to be made again: a new dispatch. The failure is logged here, once."""
        _log_failure(ticket, index, failure, "failed and is run again")
        self._groups.retry(ticket.key, index, failure)
        self._ledger.retried(ticket, index, failure)
        self._failure_guard.saw_try(ticket.key.env_name, failure)

    def record(self, ticket: Ticket, index: int, result: Rollout | Failure) -> None:
        """A rollout came back. Its failure is logged here, once."""
        if isinstance(result, Failure):
            _log_failure(ticket, index, result, "failed")
        group = self._groups.record(ticket.key, index, result)
        if group is not None:
            self._settle(group)

    def _settle(self, group: FinalGroup) -> None:
        scored = score(group, self._rules[group.ticket.key.env_name])
        _log_counts(scored)
        self._observe(scored)
        for passed in self.lineup.settle(scored):
            self._signal_guard.saw(passed)
            if passed.filtered == STALE:
                logger.debug("group {} is too old for the batch: thrown away", passed.group.ticket.key.id)
        self._on_final()
        self._failure_guard.saw(scored)


def _log_failure(ticket: Ticket, index: int, failure: Failure, what: str) -> None:
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
