"""From an environment's config to its adapter. Importing this module does not import verifiers, which takes seconds."""

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import Model
from orchestrator.envs.protocol import EnvAdapter


def load_env(config: EnvConfig, engine: Model, tokenizer: Tokenizer | None) -> EnvAdapter:
    """The environment that `config` names, not started, in this process or in its workers. Raises `UserError` if it
    does not exist or refuses its args. Without a tokenizer `engine` must be a `ChatModel`."""
    if config.num_workers:
        from orchestrator.envs.workers.env import load_in_workers

        return load_in_workers(config, engine, None if tokenizer is None else tokenizer.folder)
    from orchestrator.envs.verifiers.loading import load

    return load(config, engine, tokenizer)
