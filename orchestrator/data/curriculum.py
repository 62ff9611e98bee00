"""`Curriculum`: the examples that one environment visits, drawn in rounds by weights from earlier outcomes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from orchestrator.config.envs import CustomCurriculumConfig, DifficultyCurriculumConfig, NoCurriculumConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.data.seeds import permutation, uniforms
from orchestrator.errors import CurriculumError
from orchestrator.values.group import STALE, ZERO_SIGNAL, GroupKey, ScoredGroup
from runtime.base.imported import load_function

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExampleStats:
    """What is known of all examples of one environment, by index. Copies: a function may do with them as it likes."""

    num_visits: npt.NDArray[np.int64]
    """Groups that were drawn for the example, also if their outcome is not known yet or they were lost."""
    num_rollouts: Float64s
    """Rollouts whose reward is known, those of earlier visits discounted by `memory`."""
    mean_reward: Float64s
    """Their mean reward, discounted alike; NaN where there are none."""


WeightFunction = Callable[[ExampleStats], Float64s]


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """A weight function and the name that messages use."""

    name: str
    function: WeightFunction

    def __call__(self, env_name: str, stats: ExampleStats) -> Float64s:
        """One weight >= 0 per example, not all 0. Raises `CurriculumError` if the function breaks its contract."""
        where = f"curriculum {self.name!r} of env {env_name!r}"
        try:
            weights = np.asarray(self.function(stats), dtype=np.float64)
        except Exception as error:  # a custom function is foreign code: whatever it raises must name itself
            raise CurriculumError(f"{where} raised {type(error).__name__}: {error}") from error
        if weights.shape != stats.num_visits.shape:
            raise CurriculumError(f"{where} returned shape {weights.shape} for {len(stats.num_visits)} examples")
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise CurriculumError(f"{where} returned weights that are not all finite and >= 0, or that are all 0")
        return weights


def difficulty(stats: ExampleStats, *, target: float, spread: float, floor: float) -> Float64s:
    """1 for examples never visited, falling from 1 at `target` to `floor` at `spread` from it for those that were.

    Visited examples of which nothing is known yet (they run, or all their rollouts failed) have `floor`.
    """
    weights = np.where(stats.num_visits > 0, floor, 1.0)
    known = stats.num_rollouts > 0
    distance = np.abs(stats.mean_reward[known] - target) / spread
    weights[known] = np.maximum(floor, 1.0 - distance)
    return weights


def make_weights(config: DifficultyCurriculumConfig | CustomCurriculumConfig) -> NamedWeights:
    """The function that the config asks for. Raises `UserError` for a `custom` one that cannot be called."""
    if isinstance(config, CustomCurriculumConfig):
        function = load_function(config.import_path, config.kwargs, section="curriculum")
        return NamedWeights(config.import_path, partial(function, **config.kwargs))
    return NamedWeights(
        "difficulty", partial(difficulty, target=config.target, spread=config.spread, floor=config.floor)
    )


Indices = npt.NDArray[np.int64]


class VisitOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What came of visit `visit` to `example`: rollouts whose reward is known (0: the group was lost), and its sum."""

    visit: int
    example: int
    num_rollouts: int
    total_reward: float


def draw(weights: Float64s, number: int, *key: str | int) -> Indices:
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
        self._outcomes: dict[int, VisitOutcome] = {}
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

    def saw(self, outcome: VisitOutcome) -> None:
        """Learn from a final group."""
        if outcome.visit >= self._num_folded:
            self._outcomes[outcome.visit] = outcome

    def restore(self, tables: dict[int, Sequence[int]], outcomes: Sequence[VisitOutcome]) -> None:
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


KNOWN = (None, ZERO_SIGNAL, STALE)
"""Groups whose rewards are an outcome. Which rollouts of a group that a failure dropped came back is an accident."""


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch teaches the curriculum of one environment."""

    tables: dict[int, tuple[int, ...]]
    """Examples of each round that the batch has visits of."""
    outcomes: tuple[VisitOutcome, ...]


class Curricula:
    """By environment; one without a curriculum is not here."""

    def __init__(self, by_env: dict[str, Curriculum] | None = None) -> None:
        self.by_env = by_env or {}

    def saw(self, scored: ScoredGroup) -> None:
        """Learn from a final group."""
        key = scored.group.ticket.key
        if key.env_name in self.by_env:
            self.by_env[key.env_name].saw(self._outcome(key, scored))

    def lessons(self, groups: Iterable[ScoredGroup]) -> dict[str, Lesson]:
        """What is to be remembered of the groups of a batch, by environment."""
        outcomes: dict[str, list[VisitOutcome]] = {}
        for scored in groups:
            key = scored.group.ticket.key
            if key.env_name in self.by_env:
                outcomes.setdefault(key.env_name, []).append(self._outcome(key, scored))
        return {name: self._lesson(self.by_env[name], seen) for name, seen in outcomes.items()}

    def restore(self, lessons: dict[str, Lesson]) -> None:
        """Take in what `lessons` gave for an earlier batch."""
        for name, lesson in lessons.items():
            if name in self.by_env:
                self.by_env[name].restore(dict(lesson.tables), lesson.outcomes)

    def _outcome(self, key: GroupKey, scored: ScoredGroup) -> VisitOutcome:
        """The attempt of a group is the number of its visit (`examples.py`)."""
        example = self.by_env[key.env_name].example(key.attempt)
        rewards = [rollout.reward for _, rollout in scored.group.survivors] if scored.filtered in KNOWN else []
        return VisitOutcome(key.attempt, example, len(rewards), sum(rewards))

    @staticmethod
    def _lesson(curriculum: Curriculum, outcomes: Sequence[VisitOutcome]) -> Lesson:
        rounds = {outcome.visit // curriculum.refresh_groups for outcome in outcomes}
        return Lesson({number: tuple(curriculum.table(number).tolist()) for number in sorted(rounds)}, tuple(outcomes))


def make_curricula(config: OrchestratorConfig, num_examples: Sequence[int]) -> Curricula:
    """The curricula that the config asks for; `num_examples` is in the order of `envs`. Raises `UserError`."""
    by_env = {}
    for env, number in zip(config.envs, num_examples, strict=True):
        chosen = env.curriculum
        if not isinstance(chosen, NoCurriculumConfig):
            by_env[env.label] = Curriculum(
                env.label,
                number,
                make_weights(chosen),
                seed=config.seed,
                refresh_groups=chosen.refresh_groups,
                memory=chosen.memory,
            )
    return Curricula(by_env)
