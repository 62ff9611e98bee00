"""What keeps a final group out of a batch, and the guards that stop a run that cannot learn.

`score` turns a final group into a `ScoredGroup`; the guards see outcomes and raise when the run should stop.
"""

from collections import Counter, deque
from dataclasses import dataclass

from orchestrator.advantages import NamedAdvantage, compute_advantages
from orchestrator.errors import EnginesLostError, FailureRateError, NoSignalError
from orchestrator.groups import FinalGroup
from orchestrator.rollout import Failure, FailureReason, Rollout

ZERO_SIGNAL = "zero_signal"
"""Every advantage of the group is 0: it would add nothing to the gradient."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A final group, the advantages of its survivors, and why it will not be trained, if so."""

    group: FinalGroup
    advantages: tuple[float, ...]
    """One per survivor, in their order; empty if the group was dropped."""
    filtered: str | None

    @property
    def num_trainable(self) -> int:
        """Rollouts that this group brings to a batch."""
        return 0 if self.filtered else len(self.advantages)

    @property
    def trainable(self) -> tuple[tuple[int, Rollout, float], ...]:
        """`(index, rollout, advantage)` of everything that is trained."""
        if self.filtered:
            return ()
        pairs = zip(self.group.survivors, self.advantages, strict=True)
        return tuple((index, rollout, advantage) for (index, rollout), advantage in pairs)


def score(group: FinalGroup, advantage: NamedAdvantage) -> ScoredGroup:
    """Compute advantages once, and apply the filters."""
    if group.drop_reason is not None:
        return ScoredGroup(group, (), group.drop_reason)
    advantages = compute_advantages(advantage, group.ticket.key, [rollout for _, rollout in group.survivors])
    return ScoredGroup(group, advantages, None if any(advantages) else ZERO_SIGNAL)


class SignalGuard:
    """Stops a run whose groups never differ. Sees groups in dispatch order: it trips at the same one every time."""

    def __init__(self, max_zero_signal_groups: int) -> None:
        self._limit = max_zero_signal_groups
        self._in_a_row = 0

    def saw(self, group: ScoredGroup) -> None:
        """Raise `NoSignalError` at the limit. Groups lost to failures say nothing about the signal."""
        if group.filtered is None:
            self._in_a_row = 0
        elif group.filtered == ZERO_SIGNAL:
            self._in_a_row += 1
        if self._in_a_row >= self._limit:
            env_name, reward = group.group.ticket.key.env_name, group.group.survivors[0][1].reward
            raise NoSignalError(
                f"the last {self._in_a_row} groups had no signal (newest: env {env_name!r}, all rewards {reward:g}): "
                "the task is too easy or too hard for this model. Raise the temperature or group_size, choose easier "
                "or harder examples, or warm-start the model"
            )


class FailureGuard:
    """Stops a run in which nearly every rollout of one environment fails. Cancelled rollouts do not count."""

    def __init__(self, max_error_rate: float, window: int) -> None:
        self._max_error_rate = max_error_rate
        self._window = window
        self._recent: dict[str, deque[Failure | None]] = {}

    def saw(self, env_name: str, result: Rollout | Failure) -> None:
        """Raise `FailureRateError` or `EnginesLostError` when the full window is at the limit."""
        failure = result if isinstance(result, Failure) else None
        if failure is not None and failure.reason is FailureReason.CANCELLED:
            return
        recent = self._recent.setdefault(env_name, deque(maxlen=self._window))
        recent.append(failure)
        failures = [seen for seen in recent if seen is not None] if failure and len(recent) == self._window else []
        if failures and len(failures) >= self._max_error_rate * self._window:
            self._stop(env_name, failures)

    def _stop(self, env_name: str, failures: list[Failure]) -> None:
        (reason, message), count = Counter((seen.reason, seen.message) for seen in failures).most_common(1)[0]
        text = (
            f"{len(failures)} of the last {self._window} rollouts of env {env_name!r} failed; "
            f"the commonest error ({count}x) is {reason}: {message}"
        )
        raise EnginesLostError(text) if reason is FailureReason.ENGINE_ERROR else FailureRateError(text)
