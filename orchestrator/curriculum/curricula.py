"""`Curricula`: those of all environments of a run, and what they leave in its history."""

from collections.abc import Iterable, Sequence

import msgspec

from orchestrator.config import OrchestratorConfig
from orchestrator.curriculum.config import NoCurriculumConfig
from orchestrator.curriculum.curriculum import Curriculum, Outcome
from orchestrator.curriculum.weights import make_weights
from orchestrator.filters import STALE, ZERO_SIGNAL, ScoredGroup
from orchestrator.groups import GroupKey

KNOWN = (None, ZERO_SIGNAL, STALE)
"""Groups whose rewards are an outcome. Which rollouts of a group that a failure dropped came back is an accident."""


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch teaches the curriculum of one environment."""

    tables: dict[int, tuple[int, ...]]
    """Examples of each round that the batch has visits of."""
    outcomes: tuple[Outcome, ...]


class Curricula:
    """By environment; one without a curriculum is not here."""

    def __init__(self, by_env: dict[str, Curriculum] | None = None) -> None:
        self.by_env = by_env or {}

    def saw(self, scored: ScoredGroup) -> None:
        """A group is final."""
        key = scored.group.ticket.key
        if key.env_name in self.by_env:
            self.by_env[key.env_name].saw(self._outcome(key, scored))

    def lessons(self, groups: Iterable[ScoredGroup]) -> dict[str, Lesson]:
        """What is to be remembered of the groups of a batch, by environment."""
        outcomes: dict[str, list[Outcome]] = {}
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

    def _outcome(self, key: GroupKey, scored: ScoredGroup) -> Outcome:
        """The attempt of a group is the number of its visit (`examples.py`)."""
        example = self.by_env[key.env_name].example(key.attempt)
        rewards = [rollout.reward for _, rollout in scored.group.survivors] if scored.filtered in KNOWN else []
        return Outcome(key.attempt, example, len(rewards), sum(rewards))

    @staticmethod
    def _lesson(curriculum: Curriculum, outcomes: Sequence[Outcome]) -> Lesson:
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
