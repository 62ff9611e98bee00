"""One tiny model and one run of real ranks per world size, shared by all tests of the numeric core."""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tests.once import Once
from tests.trainer.core.rank_worker import CPU, Rank, run_rank
from tests.trainer.core.reference import reference_gradients
from tests.trainer.core.scenarios import SEQ_LEN, Scenario, batch_of
from tests.trainer.core.tiny import make_manifest, save_tiny_model
from trainer.config import ModelConfig
from trainer.model import Policy, load_policy
from trainer.plan import plan_step
from transport.sample import TrainingSample

WORLD_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class RankRun:
    """What the ranks of one group wrote down."""

    world_size: int
    out: Path

    def results(self, rank: int = 0) -> dict[str, dict]:
        return json.loads((self.out / f"rank{rank}.json").read_text())

    def gradients(self, scenario: str) -> dict[str, Tensor]:
        return load_file(self.out / f"{scenario}.safetensors")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model_path: Path) -> Policy:
    return load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN), CPU)


class References:
    """(loss, gradients) by the plain reference, of each distinct batch once."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
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
def references(model_path: Path) -> References:
    return References(model_path)


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def rank_run(request: pytest.FixtureRequest, model_path: Path, once: Once) -> RankRun:
    """All scenarios, trained by this many real processes; every `model_path` holds the same weights."""
    size = request.param
    return RankRun(size, once(f"ranks{size}", lambda out: run_ranks(size, model_path, out)))


def run_ranks(world_size: int, model_path: Path, out: Path, entry: Callable[[Rank], None] = run_rank) -> RankRun:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([entry.__module__])  # torch is imported once, not once per rank
    ranks = [Rank(rank, world_size, model_path, out) for rank in range(world_size)]
    processes = [context.Process(target=entry, args=(rank,)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    errors = [path.read_text() for path in sorted(out.glob("error*.txt"))]
    assert not alive, f"ranks hang {errors}"
    assert all(process.exitcode == 0 for process in processes), "\n".join(errors)
    return RankRun(world_size, out)
