"""Tiny models of every family, references computed once, and one run of two real ranks."""

import json
import multiprocessing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from tests.trainer.images.image_ranks import CPU, Rank, Scenario, run_rank
from tests.trainer.images.reference import reference_gradients
from tests.trainer.images.tiny_vlm import SEQ_LEN, save_tiny_vlm
from trainer.config import ModelConfig
from trainer.model import Policy, load_policy


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family."""
    families = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    return {family: save_tiny_vlm(tmp_path_factory.mktemp(family), family) for family in families}


class Policies:
    """Loaded when first asked for."""

    def __init__(self, model_paths: dict[str, Path]) -> None:
        self.load = cache(lambda family: load_policy(ModelConfig(path=model_paths[family], seq_len=SEQ_LEN), CPU))

    def __getitem__(self, family: str) -> Policy:
        return self.load(family)


@pytest.fixture(scope="session")
def policies(model_paths: dict[str, Path]) -> Policies:
    return Policies(model_paths)


class References:
    """(log probabilities by sample, gradients) by the plain reference, each batch once."""

    def __init__(self, model_paths: dict[str, Path]) -> None:
        self._model_paths = model_paths
        self._known: dict[object, tuple[list[Tensor], dict[str, Tensor | None]]] = {}

    def __getitem__(self, part: tuple[str, Scenario]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        family, scenario = part
        key = family, scenario.drawings, scenario.spoiled
        if key not in self._known:
            self._known[key] = reference_gradients(self._model_paths[family], scenario.sound())
        return self._known[key]


@pytest.fixture(scope="session")
def references(model_paths: dict[str, Path]) -> References:
    return References(model_paths)


@dataclass(frozen=True)
class TwoRanks:
    """What the ranks wrote down."""

    out: Path

    def metrics(self, family: str, scenario: str, rank: int = 0) -> dict[str, float]:
        return self._result(family, scenario, rank)["metrics"]

    def logprobs(self, family: str, scenario: str) -> dict[int, list[float]]:
        """By row, of both ranks."""
        first, second = (self._result(family, scenario, rank)["logprobs"] for rank in range(2))
        assert not first.keys() & second.keys()
        return {int(row): values for row, values in (first | second).items()}

    def _result(self, family: str, scenario: str, rank: int) -> dict[str, dict]:
        return json.loads((self.out / f"rank{rank}.json").read_text())[family][scenario]

    def gradients(self, family: str, name: str) -> dict[str, Tensor]:
        return load_file(self.out / f"{family} {name}.safetensors")


@pytest.fixture(scope="session")
def two_ranks(model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """All scenarios of both families, trained by two real processes."""
    out = tmp_path_factory.mktemp("two_ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__])
    processes = [context.Process(target=run_rank, args=(Rank(rank, 2, model_paths, out),)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(out.glob("error*.txt"))]
    assert not alive, f"ranks hang {errors}"
    assert all(process.exitcode == 0 for process in processes), "\n".join(errors)
    return TwoRanks(out)
