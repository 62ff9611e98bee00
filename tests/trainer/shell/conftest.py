"""A tiny model, batches of random samples, and the trainer run in this process on recorded batches."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger
from transformers.utils import logging as transformers_logging

from tests.trainer.core.tiny import save_tiny_model
from tests.trainer.shell.recorded import RUN_ID, record_batches
from tests.trainer.shell.runs import replay

NUM_STEPS = 4


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, with files that look like a tokenizer's."""
    transformers_logging.disable_progress_bar()
    path = save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.02)
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
