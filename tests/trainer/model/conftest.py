"""Tiny models of every family, references computed once, and one run of two real ranks."""

from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.ranks import RankRun, run_ranks
from tests.trainer.images.tiny_vlm import SEQ_LEN, reference_gradients, save_tiny_vlm
from tests.trainer.model.image_ranks import FAMILIES, ImageScenario, train_families
from tests.trainer.rank_worker import CPU
from trainer.config.model import ModelConfig
from trainer.model.policy import Policy, load_policy


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: save_tiny_vlm(folder / family, family) for family in FAMILIES}


class Policies:
    """Loaded when first asked for."""

    def __init__(self, model_paths: dict[str, Path]) -> None:
        self.load = cache(lambda family: load_policy(ModelConfig(path=model_paths[family], seq_len=SEQ_LEN), CPU))

    def __getitem__(self, family: str) -> Policy:
        return self.load(family)


@pytest.fixture(scope="session")
def policies(model_paths: dict[str, Path]) -> Policies:
    return Policies(model_paths)


class ImageReferences:
    """(log probabilities by sample, gradients) by the plain reference, each batch once."""

    def __init__(self, model_paths: dict[str, Path]) -> None:
        self._model_paths = model_paths
        self._known: dict[object, tuple[list[Tensor], dict[str, Tensor | None]]] = {}

    def __getitem__(self, part: tuple[str, ImageScenario]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        family, scenario = part
        key = family, scenario.drawings, scenario.spoiled
        if key not in self._known:
            self._known[key] = reference_gradients(self._model_paths[family], scenario.sound())
        return self._known[key]


@pytest.fixture(scope="session")
def image_references(model_paths: dict[str, Path]) -> ImageReferences:
    return ImageReferences(model_paths)


class ImageRankRun(RankRun):
    """What the ranks wrote down, by family."""

    def metrics(self, family: str, scenario: str, rank: int = 0) -> dict[str, float]:
        return self._result(family, scenario, rank)["metrics"]

    def logprobs(self, family: str, scenario: str) -> dict[int, list[float]]:
        """By row, of both ranks."""
        first, second = (self._result(family, scenario, rank)["logprobs"] for rank in range(2))
        assert not first.keys() & second.keys()
        return {int(row): values for row, values in (first | second).items()}

    def _result(self, family: str, scenario: str, rank: int) -> dict[str, dict]:
        return self.results(rank)[family][scenario]


@pytest.fixture(scope="session")
def two_ranks(model_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> ImageRankRun:
    """All scenarios of both families, trained by two real processes."""
    out = tmp_path_factory.mktemp("two_ranks")
    run_ranks(2, model_paths[FAMILIES[0]].parent, out, train_families, within_s=240)
    return ImageRankRun(2, out)
