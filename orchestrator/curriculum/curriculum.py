"""`Curriculum`: the examples that one environment visits, drawn in rounds from the outcomes of earlier rounds.

Visit `n` of the environment is in round `n // refresh_groups`. The examples of a round are drawn together, when its
first visit is due, from the outcomes of all visits **up to the end of the round before the last one**, which must all
be known by then: the scheduler waits for those that still run. So the draw is a function of the seed and of these
outcomes, whatever the timing; the round in between is what may run meanwhile.

After a kill: outcomes of visits in durable batches, and the rounds that these belong to, are in the history
(`history.py`), and are restored as they were. Other rounds are drawn again; nothing durable came of them. Batches in
dispatch order (`wait`) give these draws the same outcomes to start from as those that were lost.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from orchestrator.curriculum.weights import ExampleStats, Floats, NamedWeights
from orchestrator.seeds import permutation, uniforms

Indices = npt.NDArray[np.int64]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of visit `visit` to `example`: rollouts whose reward is known (0: the group was lost), and its sum."""

    visit: int
    example: int
    num_rollouts: int
    total_reward: float


def draw(weights: Floats, number: int, *key: str | int) -> Indices:
    """`number` examples, each with a chance that grows with its weight, drawn by `key`.

    Without replacement (the smallest of exponential variables with these rates) as long as no more than half of the
    examples are asked for; then again from all, and so on. None of weight 0 is drawn.
    """
    candidates = np.flatnonzero(weights)
    most = -(-len(candidates) // 2)
    drawn: list[Indices] = []
    while (missing := number - sum(map(len, drawn))) > 0:
        times = -np.log(uniforms(len(candidates), *key, len(drawn))) / weights[candidates]
        drawn.append(candidates[np.argsort(times, kind="stable")[: min(most, missing)]])
    return np.concatenate(drawn)[permutation(number, *key, "order")]


class Curriculum:
    """Pure bookkeeping, for the loop's thread; `table` may be read from others."""

    def __init__(
        self, env_name: str, num_examples: int, weights: NamedWeights, *, seed: int, refresh_groups: int, memory: float
    ) -> None:
        self.refresh_groups = refresh_groups
        self._env_name = env_name
        self._weights = weights
        self._seed = seed
        self._memory = memory
        self._tables: dict[int, Indices] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._num_folded = 0
        self._num_visits = np.zeros(num_examples, np.int64)
        self._num_rollouts = np.zeros(num_examples, np.float64)
        self._total_reward = np.zeros(num_examples, np.float64)

    def is_ready(self, visit: int) -> bool:
        """Whether everything is known that the choice of this visit depends on."""
        number = visit // self.refresh_groups
        return number in self._tables or self._known_up_to(self._basis(number))

    def example(self, visit: int) -> int:
        """The example of this visit, which must be ready."""
        number, offset = divmod(visit, self.refresh_groups)
        if number not in self._tables:
            self._add_table(number, self._draw(number))
        return int(self._tables[number][offset])

    def table(self, number: int) -> Indices:
        """The examples of round `number`, which was begun."""
        return self._tables[number]

    def saw(self, outcome: Outcome) -> None:
        """A group is final."""
        if outcome.visit >= self._num_folded:
            self._outcomes[outcome.visit] = outcome

    def restore(self, tables: dict[int, Sequence[int]], outcomes: Sequence[Outcome]) -> None:
        """What a batch of this run left in the history."""
        for number, table in tables.items():
            if number not in self._tables:
                self._add_table(number, np.asarray(table, np.int64))
        for outcome in outcomes:
            self.saw(outcome)

    def _basis(self, number: int) -> int:
        """Visits below this one are what the round is drawn from."""
        return max(0, number - 1) * self.refresh_groups

    def _known_up_to(self, visit: int) -> bool:
        return all(earlier in self._outcomes for earlier in range(self._num_folded, visit))

    def _draw(self, number: int) -> Indices:
        self._fold(self._basis(number))
        with np.errstate(invalid="ignore"):
            means = self._total_reward / self._num_rollouts
        stats = ExampleStats(self._num_visits.copy(), self._num_rollouts.copy(), means)
        return draw(
            self._weights(self._env_name, stats), self.refresh_groups, "curriculum", self._seed, self._env_name, number
        )

    def _add_table(self, number: int, table: Indices) -> None:
        self._tables[number] = table
        np.add.at(self._num_visits, table, 1)

    def _fold(self, visit: int) -> None:
        """Take in the outcomes of all visits below `visit`, in their order: sums of floats depend on it."""
        while self._num_folded < visit:
            outcome = self._outcomes.pop(self._num_folded)
            self._num_folded += 1
            example = outcome.example
            if outcome.num_rollouts:
                self._num_rollouts[example] = self._memory * self._num_rollouts[example] + outcome.num_rollouts
                self._total_reward[example] = self._memory * self._total_reward[example] + outcome.total_reward
