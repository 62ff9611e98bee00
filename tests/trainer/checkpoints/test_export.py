"""An exported checkpoint is the published model in a Hugging Face folder, or no folder at all."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.errors import UserError
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import weights_of
from tests.trainer.tiny import file_size_limit
from trainer.checkpoints.checkpoints import copy_model_files
from trainer.checkpoints.export import export_checkpoint, newest_checkpoint
from trainer.cli import run


def logits(path, **kwargs: object) -> torch.Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_an_exported_model_has_the_logits_of_the_published_weights(straight_run, model_path, tmp_path):
    assert run(["export", "--run", str(straight_run), "--out", str(tmp_path / "out")]) == 0
    reference = AutoModelForCausalLM.from_pretrained(model_path)
    missing, unexpected = reference.load_state_dict(weights_of(straight_run, NUM_STEPS), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    with torch.no_grad():
        expected = reference(torch.arange(20)[None]).logits
    assert torch.equal(logits(tmp_path / "out"), expected)
    assert not torch.equal(logits(model_path), expected)


def test_a_disk_that_refuses_the_model_leaves_no_folder(straight_run, tmp_path):
    with file_size_limit(50_000), pytest.raises(UserError, match=r"cannot write .*out: .*File too large"):
        export_checkpoint(newest_checkpoint(straight_run / "checkpoints"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_files_go_along_and_the_dtype_is_that_of_the_weights(straight_run, model_path, tmp_path):
    export_checkpoint(newest_checkpoint(straight_run / "checkpoints"), tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model_path / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_an_existing_folder_is_not_overwritten(straight_run, tmp_path):
    with pytest.raises(UserError, match="exists: choose another --out"):
        export_checkpoint(newest_checkpoint(straight_run / "checkpoints"), tmp_path)


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path):
    with pytest.raises(UserError, match="no valid checkpoint"):
        newest_checkpoint(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a valid checkpoint: no manifest"):
        export_checkpoint(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_everything_but_the_weights_is_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    small = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "README.md"]
    weights = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "weights.pt", ".hidden"]
    for name in [*small, *weights]:
        (source / name).write_text(name)
    (source / "folder").mkdir()
    copy_model_files(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(small)
    assert all((target / name).read_text() == name for name in small)


def test_a_huge_file_is_not_a_tokenizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    with (source / "dataset.json").open("wb") as file:
        file.truncate(65 << 20)
    copy_model_files(source, target)
    assert list(target.iterdir()) == []
