"""From `engines` in the config to the engine that generates."""

from orchestrator.config import OrchestratorConfig
from orchestrator.engines import scripted
from orchestrator.engines.http import HttpEngine
from orchestrator.engines.protocol import Engine
from orchestrator.tokenizer import Tokenizer
from runtime.secret_file import read_or_make_secret


def make_engine(config: OrchestratorConfig, tokenizer: Tokenizer) -> Engine:
    """The engine of `engines.backend`, not started. Raises `UserError` for a bad token file."""
    if config.engines.backend == "scripted":
        return scripted.from_config(config.engines.scripted, tokenizer)
    token = None if config.admin_token_file is None else read_or_make_secret(config.admin_token_file)
    return HttpEngine(config.engines, token)
