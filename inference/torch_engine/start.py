"""From the config to a running engine. Importing this module imports torch, which takes seconds: do it in a thread."""

from collections.abc import Callable

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from inference.config import InferenceConfig
from inference.engine import EngineLimits
from inference.server.chat_tokenizer import ChatTokenizer
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import eos_token_ids, load_slot_model
from inference.torch_engine.weight_intake import WeightIntake, fetch_settings

StartEngine = Callable[[Callable[[], None]], tuple[TorchEngine, ChatTokenizer]]


def load_engine(config: InferenceConfig) -> StartEngine:
    """Load model and tokenizer; the result starts the engine in the event loop that calls it, with a function that
    the engine calls whenever it makes progress. Raises `UserError`."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.torch.num_threads)
    model = load_slot_model(config.model, config.torch.max_batch_size, config.torch.max_model_len)
    tokenizer = load_tokenizer(config)
    limits = EngineLimits(
        vocab_size=model.hf.get_input_embeddings().num_embeddings,
        max_model_len=config.torch.max_model_len,
        max_batch_size=config.torch.max_batch_size,
        max_waiting=config.torch.max_waiting,
        images=None if model.vision is None else model.vision.limits,
    )
    decoder = Decoder(model, limits.max_batch_size, limits.max_model_len)
    eos = eos_token_ids(config.model.path)
    intake = WeightIntake(config.run.name, fetch_settings(config.weights), model.hf.device)

    def start(on_progress: Callable[[], None]) -> tuple[TorchEngine, ChatTokenizer]:
        engine = TorchEngine(
            decoder, limits, eos_token_ids=eos, seed=config.seed, intake=intake, on_progress=on_progress
        )
        return engine, tokenizer

    return start


def load_tokenizer(config: InferenceConfig) -> ChatTokenizer:
    """The tokenizer of the model's folder. Without one, all but the chat route works."""
    path = config.model.path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        return ChatTokenizer(None, missing=f"there is no tokenizer in {path}: {error}")
    return ChatTokenizer(tokenizer, missing="" if tokenizer.chat_template else f"{path} has no chat template")
