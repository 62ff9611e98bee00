"""Names of environments, and which settings go together: failure policy, group size, advantage, algorithm, teacher."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.advantages.config import AdvantageConfig, min_survivors, needs_siblings
from orchestrator.algorithms.config import (
    AlgorithmConfig,
    OpdAlgorithmConfig,
    TeacherConfig,
    teacher_name,
    uses_advantages,
)
from orchestrator.engines.config import EnginesConfig

if TYPE_CHECKING:
    from orchestrator.config import EnvConfig


def check_engines(engines: EnginesConfig) -> None:
    """Raise `ValueError` if the policy cannot be trained with these engines."""
    if engines.backend == "openai":
        raise ValueError(
            "engines.backend = 'openai' cannot train: an OpenAI-compatible server takes no weight updates and does not "
            "say which tokens it sampled; use 'http' or 'sglang', or evaluate that server with `orchestrator eval`"
        )


def check_labels(key: str, labels: Sequence[str]) -> None:
    """Raise `ValueError` unless the environments of config key `key` have names that fit into metric keys,
    `{metric}/{name}/{stat}`."""
    if "all" in labels:
        raise ValueError(f'{key}: the name "all" is reserved for aggregate metrics; set {key}[].name')
    unfit = [label for label in labels if not label or "/" in label]
    if unfit:
        raise ValueError(f"{key}: {unfit[0]!r} is no name: it must not be empty or hold a slash; set {key}[].name")
    if len(set(labels)) < len(labels):
        raise ValueError(f"{key}: names must differ, got {list(labels)}; set {key}[].name")


def check_env(
    env: "EnvConfig",
    advantage: AdvantageConfig,
    algorithm: AlgorithmConfig,
    teachers: Mapping[str, TeacherConfig],
) -> None:
    """Raise `ValueError`, naming the environment and what to change, unless `env` can learn as configured."""
    _check_group_size(env)
    _check_teacher(env, algorithm, teachers)
    if not uses_advantages(algorithm):
        if env.advantage is not None:
            raise ValueError(
                f"envs: {env.label!r} sets advantage {env.advantage.type!r}, which algorithm {algorithm.type!r} does "
                "not use: remove it"
            )
        return
    if needs_siblings(advantage) and env.group_size < 2:
        raise ValueError(
            f"envs: advantage {advantage.type!r} compares rollouts of a group: {env.label!r} needs group_size >= 2"
        )
    if env.min_group_size is not None and env.min_group_size < min_survivors(advantage):
        raise ValueError(
            f"envs: advantage {advantage.type!r} needs at least {min_survivors(advantage)} rollouts of a group: "
            f"{env.label!r} has min_group_size = {env.min_group_size}"
        )


def _check_group_size(env: "EnvConfig") -> None:
    if env.min_group_size is None:
        return
    if env.min_group_size > env.group_size:
        raise ValueError(
            f"envs: min_group_size ({env.min_group_size}) of {env.label!r} is above its group_size ({env.group_size})"
        )
    if env.drops_groups:
        raise ValueError(
            f"envs: {env.label!r} has failure_policy = 'drop_group', which leaves min_group_size no meaning: remove it"
        )


def _check_teacher(env: "EnvConfig", algorithm: AlgorithmConfig, teachers: Mapping[str, TeacherConfig]) -> None:
    name = teacher_name(algorithm)
    if name is not None and name not in teachers:
        known = ", ".join(sorted(teachers)) or "none"
        raise ValueError(
            f"envs: algorithm {algorithm.type!r} of {env.label!r} names teacher {name!r}, but teachers has {known}"
        )
    if name is not None and isinstance(algorithm, OpdAlgorithmConfig) and teachers[name].backend == "openai":
        raise ValueError(
            f"envs: {env.label!r} has algorithm {algorithm.type!r}, which needs log probabilities of given tokens: "
            f"teacher {name!r} is an OpenAI-compatible server, which does not tell them; use backend = 'http'"
        )
