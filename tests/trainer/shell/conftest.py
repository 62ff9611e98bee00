"""A tiny model, batches of random samples, and the trainer run in this process on recorded batches."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loguru import logger
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from tests.trainer.shell.recorded import RUN_ID, record_batches
from tests.trainer.shell.runs import replay

NUM_STEPS = 4


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, with files that look like a tokenizer's."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`NUM_STEPS` recorded batches."""
    return record_batches(tmp_path_factory.mktemp("recording"), RUN_ID, NUM_STEPS)


@pytest.fixture(autouse=True)
def _quiet_logging() -> Iterator[None]:
    """A trainer in this process takes over logging and warnings: give them back."""
    yield
    logging.captureWarnings(False)
    logger.remove()


@pytest.fixture(scope="session")
def straight_run(model_path: Path, recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording trained without any interruption: what every interrupted run must arrive at."""
    return replay(model_path, recording, tmp_path_factory.mktemp("runs"), RUN_ID, "--checkpoint.interval-steps", "100")
