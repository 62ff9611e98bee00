"""From `engines` in the config to the engine that generates."""

from typing import TYPE_CHECKING

from chat.tokenizer import Tokenizer
from orchestrator.config.engines import EnginesConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines import scripted
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.openai import OpenAIModel
from orchestrator.engines.protocol import Engine
from orchestrator.engines.sglang import SglangClient
from runtime.base.files import read_or_make_secret
from runtime.errors import UserError

if TYPE_CHECKING:
    from orchestrator.config.eval import EvalCommandConfig


def make_engine(config: OrchestratorConfig, tokenizer: Tokenizer) -> Engine:
    """The engine of `engines.backend`, not started. Raises `UserError` for a bad token file."""
    file = None if config.engines.backend == "scripted" else config.admin_token_file
    token = None if file is None else read_or_make_secret(file)
    return _token_engine(config.engines, tokenizer, token)


def make_eval_model(config: "EvalCommandConfig", tokenizer: Tokenizer | None) -> Engine | OpenAIModel:
    """What `orchestrator eval` asks, not started. Raises `UserError`."""
    engines = config.engines
    if engines.backend == "openai":
        return OpenAIModel(engines.urls, engines, tokenizer)
    if tokenizer is None:
        raise UserError(f"engines.backend = {engines.backend!r} needs model.path")
    return _token_engine(engines, tokenizer, admin_token=None)


def _token_engine(engines: EnginesConfig, tokenizer: Tokenizer, admin_token: str | None) -> Engine:
    if engines.backend == "scripted":
        return scripted.from_config(engines.scripted, tokenizer)
    if engines.backend == "sglang":
        vocab_size = tokenizer.vocab_size
        return HttpEngine(engines, connect=lambda session, url: SglangClient(session, url, admin_token, vocab_size))
    return HttpEngine(engines, admin_token)
