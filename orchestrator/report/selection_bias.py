"""`SelectionBias`: what was trained against what was generated, as sums over groups.

`waste` is the share of sampled tokens of **finished** rollouts that were not trained: groups without signal, groups
that a failure dropped, stale groups. A rollout that failed or was cancelled never tells how many tokens it had; it is
in `rollout_waste`, the share of started rollouts (tries included) that were not trained, for whatever reason. Rollouts
that the end of the run cancels belong to no step: the ledger counts them.
`length_bias` is the mean number of sampled tokens of a trained rollout over that of a finished one: below 1, long
rollouts are trained less often than they occur.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.values.group import STALE, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionBias:
    """Sums over rollouts; tokens are sampled ones."""

    num_started: int = 0
    num_finished: int = 0
    num_trained: int = 0
    finished_tokens: int = 0
    trained_tokens: int = 0
    stale_tokens: int = 0
    """Tokens of finished rollouts that were thrown away for their age."""

    @property
    def waste(self) -> float:
        """Only if something has finished."""
        return 1.0 - self.trained_tokens / self.finished_tokens

    @property
    def stale_waste(self) -> float:
        """The part of `waste` that age is to blame for."""
        return self.stale_tokens / self.finished_tokens

    @property
    def rollout_waste(self) -> float:
        """Only if something was started."""
        return 1.0 - self.num_trained / self.num_started

    @property
    def length_bias(self) -> float:
        """Only if something was trained."""
        return (self.trained_tokens / self.num_trained) / (self.finished_tokens / self.num_finished)


def selection_bias(groups: Iterable[ScoredGroup]) -> SelectionBias:
    """The sums over these groups."""
    started = finished = trained = finished_tokens = trained_tokens = stale_tokens = 0
    for scored in groups:
        tokens = sum(rollout.num_sampled_tokens for _, rollout in scored.group.survivors)
        started += scored.group.num_dispatched
        finished += len(scored.group.survivors)
        finished_tokens += tokens
        if scored.num_trainable:
            trained += scored.num_trainable
            trained_tokens += tokens
        elif scored.filtered == STALE:
            stale_tokens += tokens
    return SelectionBias(
        num_started=started,
        num_finished=finished,
        num_trained=trained,
        finished_tokens=finished_tokens,
        trained_tokens=trained_tokens,
        stale_tokens=stale_tokens,
    )


def selection_bias_metrics(name: str, selection: SelectionBias) -> dict[str, float]:
    """The shares under `waste/{name}/` and `length_bias/{name}/`."""
    values: dict[str, float] = {}
    if selection.num_started:
        values[f"waste/{name}/rollout_share"] = selection.rollout_waste
    if selection.finished_tokens:
        values[f"waste/{name}/share"] = selection.waste
        values[f"waste/{name}/stale_share"] = selection.stale_waste
    if selection.num_trained:
        values[f"length_bias/{name}/ratio"] = selection.length_bias
    return values
