"""`Collector`: takes rollouts as they come back and puts final groups into the line, from where batches are cut.

The "groups" loop of the table in `orchestrator.py`: it has no task of its own, the last member of a group drives it.
"""

from collections.abc import Callable

from loguru import logger

from orchestrator.advantages import NamedAdvantage
from orchestrator.filters import FailureGuard, ScoredGroup, SignalGuard, score
from orchestrator.groups import FinalGroup, GroupBuffer, Ticket
from orchestrator.ledger import Ledger
from orchestrator.lineup import Lineup
from orchestrator.rollout import Failure, Rollout


class Collector:
    """Owns open groups and the line. `on_final` is called after every final group. Raises what the guards raise."""

    def __init__(
        self,
        lineup: Lineup,
        ledger: Ledger,
        advantage: NamedAdvantage,
        failure_guard: FailureGuard,
        signal_guard: SignalGuard,
        on_final: Callable[[], None],
    ) -> None:
        self.lineup = lineup
        self._ledger = ledger
        self._advantage = advantage
        self._failure_guard = failure_guard
        self._signal_guard = signal_guard
        self._on_final = on_final
        self._groups = GroupBuffer()

    def dispatched(self, ticket: Ticket) -> None:
        """A group is about to start."""
        self._ledger.dispatched(ticket)
        self._groups.open(ticket)
        self.lineup.dispatch(ticket)

    def record(self, ticket: Ticket, index: int, result: Rollout | Failure) -> None:
        """A rollout came back. Its failure is logged here, once."""
        if isinstance(result, Failure):
            logger.warning("rollout {}#{} failed: {}: {}", ticket.key.id, index, result.reason.value, result.message)
        group = self._groups.record(ticket.key, index, result)
        if group is not None:
            self._settle(group)
        self._failure_guard.saw(ticket.key.env_name, result)

    def _settle(self, group: FinalGroup) -> None:
        scored = score(group, self._advantage)
        _log_counts(scored)
        for passed in self.lineup.settle(scored):
            self._signal_guard.saw(passed)
        self._on_final()


def _log_counts(scored: ScoredGroup) -> None:
    group = scored.group
    logger.log(
        "INFO" if group.failures else "DEBUG",
        "group {} is final: {} of {} rollouts came back, {} can be trained",
        group.ticket.key.id,
        len(group.survivors),
        group.ticket.size,
        scored.num_trainable,
    )
