"""From the config to environments as their algorithm wants them: played by the policy or by a teacher, scored or not.

No teacher, no wrapper: plain `rl` costs nothing.
"""

from collections.abc import Callable, Mapping

from orchestrator.algorithms.config import OpdAlgorithmConfig, SftAlgorithmConfig, teacher_name
from orchestrator.algorithms.taught_env import ScoredEnv
from orchestrator.algorithms.teacher import Teacher
from orchestrator.config import EnvConfig, OrchestratorConfig
from orchestrator.engines.chat_model import Model
from orchestrator.engines.openai import OpenAIModel
from orchestrator.envs.protocol import EnvAdapter
from orchestrator.tokenizer import Tokenizer

LoadEnv = Callable[[EnvConfig, Model], EnvAdapter]
AnyTeacher = Teacher | OpenAIModel


def make_teachers(
    config: OrchestratorConfig, vocab_size: int, tokenizer: Tokenizer | None = None
) -> dict[str, AnyTeacher]:
    """Those that an environment needs, by name, not started."""
    names = dict.fromkeys(teacher_name(config.algorithm_of(env)) for env in config.envs)
    return {name: _make(name, config, vocab_size, tokenizer) for name in names if name is not None}


def _make(name: str, config: OrchestratorConfig, vocab_size: int, tokenizer: Tokenizer | None) -> AnyTeacher:
    teacher = config.teachers[name]
    if teacher.backend == "openai":
        return OpenAIModel((teacher.url,), teacher, tokenizer, name=f"teacher {name!r}")
    return Teacher(name, teacher, vocab_size)


def load_envs(
    config: OrchestratorConfig, policy: Model, teachers: Mapping[str, AnyTeacher], load: LoadEnv
) -> list[EnvAdapter]:
    """One adapter per environment, in the order of the config. Environments with the same teacher share it."""
    return [_load(config, env, policy, teachers, load) for env in config.envs]


def _load(
    config: OrchestratorConfig, env: EnvConfig, policy: Model, teachers: Mapping[str, AnyTeacher], load: LoadEnv
) -> EnvAdapter:
    match config.algorithm_of(env):
        case SftAlgorithmConfig(teacher=name):
            return load(env, teachers[name])
        case OpdAlgorithmConfig(teacher=name):
            teacher = teachers[name]
            assert isinstance(teacher, Teacher), "the config says that it scores (`config_rules`)"
            return ScoredEnv(load(env, policy), teacher)
        case _:
            return load(env, policy)
