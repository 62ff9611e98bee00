"""`FailureGuard`: stops a run that loses nearly all rollouts of one environment to failures.

What counts is what failures cost. Where they cost a whole group (scored jointly, `drop_group`, too few survivors) all
its rollouts are lost, those that finished included: one member that always fails costs everything, however many others
do well. So rollouts are counted when their group is final, when this is known.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orchestrator.errors import EnginesLostError, FailureRateError
from orchestrator.filters import ScoredGroup
from orchestrator.rollout import Failure, FailureReason, commonest_failure


class _Loss(NamedTuple):
    """Why a rollout, or a try of one, is lost."""

    culprit: int
    """Place in the group of the one that failed."""
    failure: Failure
    is_own: bool
    """Whether the lost one is the one that failed."""


class FailureGuard:
    """Looks at the last `window` rollouts of each environment, tries included. Those that were cancelled do not count,
    unless with a group that is lost."""

    def __init__(self, max_error_rate: float, window: int) -> None:
        self._max_error_rate = max_error_rate
        self._window = window
        self._recent: dict[str, deque[_Loss | None]] = {}

    def saw_try(self, env_name: str, index: int, failure: Failure) -> None:
        """A try failed and is made again. Raises like `saw`."""
        if not _was_cancelled(failure):
            self._add(env_name, [_Loss(index, failure, True)])

    def saw(self, scored: ScoredGroup) -> None:
        """A group is final. Raises `FailureRateError` or `EnginesLostError` when the full window is at the limit."""
        self._add(scored.group.ticket.key.env_name, list(_outcomes(scored)))

    def _add(self, env_name: str, outcomes: Sequence[_Loss | None]) -> None:
        recent = self._recent.setdefault(env_name, deque(maxlen=self._window))
        recent.extend(outcomes)
        if len(recent) == self._window and any(outcomes):
            losses = [outcome for outcome in recent if outcome is not None]
            if losses and len(losses) >= self._max_error_rate * self._window:
                self._stop(env_name, losses)

    def _stop(self, env_name: str, losses: Sequence[_Loss]) -> None:
        commonest, count = commonest_failure([loss.failure for loss in losses])
        text = (
            f"{len(losses)} of the last {self._window} rollouts of env {env_name!r} {_fate(losses)}; "
            f"the commonest error ({count}x) is {commonest.reason}: {commonest.message}"
        )
        is_peer = commonest.reason in (FailureReason.ENGINE_ERROR, FailureReason.TEACHER_ERROR)
        raise EnginesLostError(text) if is_peer else FailureRateError(text)


def _outcomes(scored: ScoredGroup) -> Iterator[_Loss | None]:
    """One per rollout that counts; `None` if it is not lost."""
    failures = [(index, failure) for index, failure in scored.group.failures if not _was_cancelled(failure)]
    if scored.is_lost and failures:
        own = dict(failures)
        first_index, first = failures[0]
        for index in range(scored.group.ticket.size):
            yield _Loss(index, own[index], True) if index in own else _Loss(first_index, first, False)
        return
    yield from (_Loss(index, failure, True) for index, failure in failures)
    yield from (None for _ in scored.group.survivors)


def _was_cancelled(failure: Failure) -> bool:
    return failure.reason is FailureReason.CANCELLED


def _fate(losses: Sequence[_Loss]) -> str:
    """In words; names the member of the groups that failed, if it was always the same."""
    if all(loss.is_own for loss in losses):
        return "failed"
    indices = {loss.culprit for loss in losses}
    who = f": in each group rollout #{indices.pop()} failed" if len(indices) == 1 else ""
    return f"failed or were lost with their group{who}"
