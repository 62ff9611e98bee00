"""Tiny models, recorded batches, a run of the trainer on them, and one run of real ranks per world size."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loguru import logger
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tests.support.once import Once
from tests.support.ranks import RankRun, run_ranks
from tests.trainer.rank_worker import CPU, train_all
from tests.trainer.reference import reference_gradients
from tests.trainer.runs import RUN_ID, record_batches, replay
from tests.trainer.scenarios import SEQ_LEN, Scenario, batch_of, make_manifest, save_tiny_model
from trainer.config.model import ModelConfig
from trainer.model.policy import Policy, load_policy
from trainer.planning.plan import plan_step
from transport.wire.sample import TrainingSample

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


WORLD_SIZES = (1, 2, 4)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def bare_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(bare_model_path: Path) -> Policy:
    return load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN), CPU)


class References:
    """(loss, gradients) by the plain reference, of each distinct batch once."""

    def __init__(self, bare_model_path: Path) -> None:
        self._model_path = bare_model_path
        self._known: dict[object, tuple[float, dict[str, Tensor]]] = {}

    def __getitem__(self, part: tuple[Scenario, int]) -> tuple[float, dict[str, Tensor]]:
        scenario, mini_batch = part
        plain = replace(scenario, cap=SEQ_LEN, pad_multiple=1, shuffle_seed=None)
        key = plain, mini_batch
        if key not in self._known:
            samples = samples_of(scenario, mini_batch)
            self._known[key] = reference_gradients(
                self._model_path, samples, SEQ_LEN, scenario.loss, scenario.weighting
            )
        return self._known[key]


def samples_of(scenario: Scenario, mini_batch: int) -> list[TrainingSample]:
    """The samples of one mini-batch; which they are is the planner's business, and `test_plan` is about it."""
    samples = batch_of(scenario.batch)
    plan = plan_step(make_manifest(samples), scenario.layout(0, 1))
    return [samples[row] for row in sorted(plan.mini_batches[mini_batch].rows.tolist())]


@pytest.fixture(scope="session")
def references(bare_model_path: Path) -> References:
    return References(bare_model_path)


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def rank_run(request: pytest.FixtureRequest, bare_model_path: Path, once: Once) -> RankRun:
    """All scenarios, trained by this many real processes; every `bare_model_path` holds the same weights."""
    size = request.param
    return RankRun(size, once(f"ranks{size}", lambda out: run_ranks(size, bare_model_path, out, train_all)))
