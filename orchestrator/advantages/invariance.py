"""`check_advantage`: tries on a custom advantage function what every advantage function must promise."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from chat.trajectory import Branch
from orchestrator.advantages.contract import NamedAdvantage
from orchestrator.advantages.functions import compute_advantages
from orchestrator.errors import AdvantageError
from orchestrator.values.group import GroupKey
from orchestrator.values.rollout import Rollout

KEY = GroupKey("check", "0", 0)
TOLERANCE = 1e-6

REWARDS: dict[str, tuple[float, ...]] = {
    "mixed": (0.0, 1.0, 0.25, 1.0, -2.0),
    "equal": (0.5, 0.5, 0.5, 0.5),
    "all zero": (0.0, 0.0, 0.0),
    "pair": (1.0, 0.0),
    "large": (1e6, -1e6, 3.0),
    "nearly equal": (1.0, 1.0 + 1e-12),
}


@dataclass(frozen=True, slots=True)
class AdvantageCheck:
    """One promise and whether it was kept."""

    name: str
    passed: bool
    detail: str


def check_advantage(advantage: NamedAdvantage) -> Iterator[AdvantageCheck]:
    """Try every promise; a function that raises breaks the one that it was tried on."""
    for name, rewards in REWARDS.items():
        yield _attempt(f"finite: {name} rewards", lambda rewards=rewards: _check_finite(advantage, rewards))  # type: ignore[misc]
    yield _attempt("singleton: a group of one has advantage 0", lambda: _check_singleton(advantage))
    yield _attempt("order: rollouts shuffled", lambda: _check_order(advantage))
    yield _attempt("pure: the same again, inputs unchanged", lambda: _check_pure(advantage))


def _attempt(name: str, check: Callable[[], str]) -> AdvantageCheck:
    try:
        return AdvantageCheck(name, True, check())
    except AdvantageError as error:
        return AdvantageCheck(name, False, str(error))


def _check_finite(advantage: NamedAdvantage, rewards: Sequence[float]) -> str:
    advantages = compute_advantages(advantage, KEY, make_group(rewards))
    return ", ".join(f"{value:+.3g}" for value in advantages)


def _check_singleton(advantage: NamedAdvantage) -> str:
    for reward in (0.0, 1.0, -3.0):
        (value,) = compute_advantages(advantage, KEY, make_group([reward]))
        if advantage.can_vanish and value != 0:
            raise AdvantageError(f"a single rollout of reward {reward} has advantage {value:.3g}")
    return "0" if advantage.can_vanish else "any number: zero is not the last word here"


def _check_order(advantage: NamedAdvantage) -> str:
    group = make_group(REWARDS["mixed"])
    order = [3, 0, 4, 1, 2]
    expected = np.array(compute_advantages(advantage, KEY, group))[order]
    actual = np.array(compute_advantages(advantage, KEY, [group[place] for place in order]))
    if not np.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise AdvantageError(f"the same rollouts in another order get {actual.tolist()}, not {expected.tolist()}")
    return "each rollout keeps its advantage"


def _check_pure(advantage: NamedAdvantage) -> str:
    group = make_group(REWARDS["mixed"])
    first, second = (compute_advantages(advantage, KEY, group) for _ in range(2))
    if first != second:
        raise AdvantageError(f"two calls with the same group give {list(first)} and {list(second)}")
    if any(
        changed.metrics != fresh.metrics for changed, fresh in zip(group, make_group(REWARDS["mixed"]), strict=True)
    ):
        raise AdvantageError("the call changed a rollout")
    return "bit-equal"


def make_group(rewards: Sequence[float]) -> list[Rollout]:
    """Rollouts of one example, of different lengths."""
    return [_rollout(place, reward) for place, reward in enumerate(rewards)]


def _rollout(place: int, reward: float) -> Rollout:
    length = 6 + 5 * place
    sampled = np.arange(length) >= 3
    branch = Branch(
        token_ids=np.arange(length, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        versions=(),
    )
    return Rollout(
        env_name=KEY.env_name,
        example_id=KEY.example_id,
        reward=reward,
        branches=(branch,),
        temperature=1.0,
        is_truncated=False,
        metrics={"place": float(place)},
        messages=(),
        duration_s=0.0,
    )
