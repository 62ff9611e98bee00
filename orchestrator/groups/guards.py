"""Guards that stop a run which loses nearly everything (`FailureGuard`) or cannot learn (`SignalGuard`)."""

from collections import deque
from collections.abc import Sequence
from itertools import chain

from orchestrator.errors import EnginesLostError, FailureRateError, NoSignalError
from orchestrator.values.group import STALE, ZERO_SIGNAL, ScoredGroup
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure, commonest_failure

ERROR_WINDOW = 200
"""Rollouts of one environment that are looked at: enough that a share of 0.9 is no accident, few enough that a run
which cannot work stops within minutes."""
MIN_GROUPS = 40
"""At `max_error_rate` 0.9, an environment that loses half its groups by bad luck is stopped once in 10^7 windows."""

_Failures = tuple[tuple[int, RolloutFailure], ...]
"""Failures of one group, each with its place in the group."""


class FailureGuard:
    """Looks at the last `window` rollouts of each environment, tries included but not those that were cancelled, and at
    its last groups: as many as have `window` rollouts, at least `MIN_GROUPS`.

    Both methods raise `FailureRateError`, or `EnginesLostError` if it is an engine's or a teacher's fault.
    """

    def __init__(self, max_error_rate: float, window: int = ERROR_WINDOW) -> None:
        self._max_error_rate = max_error_rate
        self._window = window
        self._rollouts: dict[str, deque[RolloutFailure | None]] = {}
        """`None`: it did not fail."""
        self._groups: dict[str, deque[_Failures | None]] = {}
        """`None`: failures did not cost the group."""

    def saw_try(self, env_name: str, failure: RolloutFailure) -> None:
        """A try failed and is made again."""
        if not _was_cancelled(failure):
            self._add_rollouts(env_name, [failure])

    def saw(self, scored: ScoredGroup) -> None:
        """Count a final group."""
        env_name, size = scored.env_name, scored.group.ticket.size
        failures = tuple((index, failure) for index, failure in scored.group.failures if not _was_cancelled(failure))
        outcomes = [None if isinstance(result, Rollout) else result for result in scored.group.results]
        self._add_rollouts(env_name, [one for one in outcomes if one is None or not _was_cancelled(one)])
        self._add_group(env_name, size, failures if scored.is_lost and failures else None)

    def _add_rollouts(self, env_name: str, outcomes: Sequence[RolloutFailure | None]) -> None:
        recent = self._rollouts.setdefault(env_name, deque(maxlen=self._window))
        recent.extend(outcomes)
        failures = [failure for failure in recent if failure is not None]
        if any(outcomes) and self._is_at_limit(len(failures), recent):
            self._stop(f"{len(failures)} of the last {len(recent)} rollouts of env {env_name!r} failed", failures)

    def _add_group(self, env_name: str, size: int, failures: _Failures | None) -> None:
        num_groups = max(self._window // size, MIN_GROUPS)
        recent = self._groups.setdefault(env_name, deque(maxlen=num_groups))
        recent.append(failures)
        lost = [failed for failed in recent if failed is not None]
        if failures and self._is_at_limit(len(lost), recent):
            what = f"{len(lost)} of the last {len(recent)} groups of env {env_name!r} were lost to failures"
            self._stop(what + _culprit(lost), [failure for _, failure in chain.from_iterable(lost)])

    def _is_at_limit(self, num_lost: int, recent: deque[RolloutFailure | None] | deque[_Failures | None]) -> bool:
        return len(recent) == recent.maxlen and num_lost >= self._max_error_rate * len(recent)

    def _stop(self, what: str, failures: Sequence[RolloutFailure]) -> None:
        commonest, count = commonest_failure(failures)
        text = f"{what}; the commonest error ({count}x) is {commonest.reason}: {commonest.message}"
        is_peer = commonest.reason in (FailureReason.ENGINE_ERROR, FailureReason.TEACHER_ERROR)
        raise EnginesLostError(text) if is_peer else FailureRateError(text)


def _was_cancelled(failure: RolloutFailure) -> bool:
    return failure.reason is FailureReason.CANCELLED


def _culprit(lost: Sequence[_Failures]) -> str:
    """Names the member that failed, if it was the same one in every lost group."""
    culprits = set.intersection(*({index for index, _ in failures} for failures in lost))
    return f": in each of them rollout #{min(culprits)} failed" if culprits else ""


class SignalGuard:
    """Stops a run whose groups never differ. Sees groups in the order in which they are put into batches: under `wait`
    it trips at the same one every time."""

    def __init__(self, max_zero_signal_groups: int) -> None:
        self._limit = max_zero_signal_groups
        self._in_a_row = 0

    def saw(self, group: ScoredGroup) -> None:
        """Raise `NoSignalError` at the limit. Groups lost to failures say nothing about the signal."""
        if group.filtered in (None, STALE):  # a stale one had a signal
            self._in_a_row = 0
        elif group.filtered == ZERO_SIGNAL:
            self._in_a_row += 1
        if self._in_a_row >= self._limit:
            env_name, reward = group.env_name, group.group.survivors[0][1].reward
            raise NoSignalError(
                f"the last {self._in_a_row} groups had no signal (newest: env {env_name!r}, all rewards {reward:g}): "
                "the task is too easy or too hard for this model. Raise the temperature or group_size, choose easier "
                "or harder examples, or warm-start the model"
            )
