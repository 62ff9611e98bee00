"""Names, shapes and digest of the files that vLLM loads: the same as the embedded engine finds in the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from inference.vllm_engine.checkpoint import checkpoint_digest, checkpoint_shapes
from inference.weights.publish import model_digest, served_tensors
from runtime.errors import UserError
from tests.support.models import make_model, save_model


def test_digest_is_that_of_the_loaded_model(model: PreTrainedModel, model_dir: Path) -> None:
    assert checkpoint_digest(model_dir, torch.float32) == model_digest(model)


def test_digest_is_of_the_type_that_is_served(model_dir: Path) -> None:
    assert checkpoint_digest(model_dir, torch.bfloat16) == model_digest(make_model().to(torch.bfloat16))


def test_digest_does_not_depend_on_the_files(tmp_path: Path, model: PreTrainedModel, model_dir: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint_digest(tmp_path, torch.float32) == checkpoint_digest(model_dir, torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_a_publish(tmp_path: Path, tied: bool) -> None:
    model = make_model(tied=tied)
    expected = {name: tuple(tensor.shape) for name, tensor in served_tensors(model)}
    assert checkpoint_shapes(save_model(tmp_path, model)) == expected
    assert ("lm_head.weight" in expected) is not tied


def test_stored_copy_of_a_tied_head_is_left_out(tmp_path: Path, model: PreTrainedModel) -> None:
    save_model(tmp_path, model)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert checkpoint_digest(tmp_path, torch.float32) == model_digest(model)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="safetensors"):
        checkpoint_shapes(tmp_path)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model\.safetensors is not"):
        checkpoint_shapes(tmp_path)
