"""From the config to environments as their algorithm wants them: played by the policy or by a teacher, scored or not.

No teacher, no wrapper: plain `rl` costs nothing.
"""

from collections.abc import Callable, Mapping

from orchestrator.algorithms.chat_teacher import ChatTeacher
from orchestrator.algorithms.config import OpdAlgorithmConfig, SftAlgorithmConfig, TeacherConfig
from orchestrator.algorithms.taught_env import PlayedEnv, ScoredEnv
from orchestrator.algorithms.teacher import Teacher
from orchestrator.config import EnvConfig, OrchestratorConfig
from orchestrator.engines.chat_model import Model
from orchestrator.envs.protocol import EnvAdapter
from orchestrator.tokenizer import Tokenizer

LoadEnv = Callable[[EnvConfig, Model], EnvAdapter]


def load_envs(
    config: OrchestratorConfig, policy: Model, vocab_size: int, load: LoadEnv, tokenizer: Tokenizer | None = None
) -> list[EnvAdapter]:
    """One adapter per environment, in the order of the config. Environments with the same teacher share it."""
    teachers = {name: _make_teacher(name, teacher, vocab_size, tokenizer) for name, teacher in config.teachers.items()}
    return [_load(config, env, policy, teachers, load) for env in config.envs]


def _make_teacher(
    name: str, config: TeacherConfig, vocab_size: int, tokenizer: Tokenizer | None
) -> Teacher | ChatTeacher:
    if config.backend == "openai":
        return ChatTeacher(name, config, tokenizer)
    return Teacher(name, config, vocab_size)


def _load(
    config: OrchestratorConfig,
    env: EnvConfig,
    policy: Model,
    teachers: Mapping[str, Teacher | ChatTeacher],
    load: LoadEnv,
) -> EnvAdapter:
    match config.algorithm_of(env):
        case SftAlgorithmConfig(teacher=name):
            return PlayedEnv(load(env, teachers[name]), teachers[name])
        case OpdAlgorithmConfig(teacher=name):
            teacher = teachers[name]
            assert isinstance(teacher, Teacher), "the config says that it scores (`config_rules`)"
            return ScoredEnv(load(env, policy), teacher)
        case _:
            return load(env, policy)
