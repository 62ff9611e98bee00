"""From the config to environments as their algorithm wants them: played by the policy or by a teacher, scored or not.

No teacher, no wrapper: plain `rl` costs nothing.
"""

from collections.abc import Callable

from orchestrator.algorithms.config import OpdAlgorithmConfig, SftAlgorithmConfig
from orchestrator.algorithms.taught_env import PlayedEnv, ScoredEnv
from orchestrator.algorithms.teacher import Teacher
from orchestrator.config import EnvConfig, OrchestratorConfig
from orchestrator.engines.protocol import Generator
from orchestrator.envs.protocol import EnvAdapter

LoadEnv = Callable[[EnvConfig, Generator], EnvAdapter]


def load_envs(config: OrchestratorConfig, policy: Generator, vocab_size: int, load: LoadEnv) -> list[EnvAdapter]:
    """One adapter per environment, in the order of the config. Environments with the same teacher share it."""
    teachers = {name: Teacher(name, teacher, vocab_size) for name, teacher in config.teachers.items()}
    return [_load(config, env, policy, teachers, load) for env in config.envs]


def _load(
    config: OrchestratorConfig, env: EnvConfig, policy: Generator, teachers: dict[str, Teacher], load: LoadEnv
) -> EnvAdapter:
    match config.algorithm_of(env):
        case SftAlgorithmConfig(teacher=name):
            return PlayedEnv(load(env, teachers[name]), teachers[name])
        case OpdAlgorithmConfig(teacher=name):
            return ScoredEnv(load(env, policy), teachers[name])
        case _:
            return load(env, policy)
