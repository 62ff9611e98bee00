"""The tensors of a checkpoint: in files of bounded size, and none of them can run code."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from runtime.errors import StorageError
from tests.trainer.shell.tiny import ALONE, make_tiny
from trainer.checkpoints import state as checkpoint_state
from trainer.checkpoints.state import TrainState, file_numbers, load_tensors, load_weights, save_tensors
from trainer.config.model import OptimizerConfig
from trainer.optimizer import make_optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny = make_tiny()
    save_tensors(tmp_path, tiny, ALONE)
    return tmp_path


def test_state_is_split_into_files_and_loaded_from_all_of_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_state, "FILE_BYTES", 100)
    tiny, other = make_tiny(), make_tiny(seed=1)
    tiny.step()
    save_tensors(tmp_path, tiny, ALONE)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    load_tensors(tmp_path, other, ALONE)
    for name, value in other.state().items():
        assert torch.equal(value, tiny.state()[name]), name


def test_first_rank_places_the_random_states_of_all_ranks(monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_state, "FILE_BYTES", 100)
    numbers = file_numbers({"model.a": torch.zeros(20), "model.b": torch.zeros(10), "model.c": torch.zeros(20)}, 2)
    assert {key: number for key, number in numbers.items() if key.startswith("model.")} == {
        "model.a": 1,
        "model.b": 1,
        "model.c": 2,
    }
    assert numbers["rng.0.cpu"] == numbers["rng.1.cpu"] == 1


def test_weights_of_any_memory_order_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.arange(15.0).reshape(3, 5).T)
    assert not model.weight.is_contiguous()
    save_tensors(tmp_path, TrainState(model, make_optimizer(model, OptimizerConfig())), ALONE)
    assert torch.equal(load_weights(tmp_path)["weight"], model.weight)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize(
    "write", [lambda path, data: path.write_bytes(pickle.dumps(data)), lambda p, d: torch.save(d, p)]
)
def test_a_pickle_in_the_place_of_tensors_is_refused_and_not_run(saved: Path, write) -> None:
    (file,) = saved.glob("*.safetensors")
    write(file, Payload(saved / "ran"))
    with pytest.raises(StorageError, match="cannot be read"):
        load_weights(saved)
    assert not (saved / "ran").exists()


def test_unsound_tensors_are_an_error_that_names_the_folder(saved: Path) -> None:
    (file,) = saved.glob("*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(StorageError, match=str(saved)):
        load_weights(saved)
