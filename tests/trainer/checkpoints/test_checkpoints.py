"""Checkpoints: a run goes on exactly; files of bounded size, none can run code; damage is found.

An exported checkpoint is the published model in a Hugging Face folder, or no folder at all.
"""

import json
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from runtime.errors import StorageError, UserError
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import weights_of
from tests.trainer.tiny import ALONE, file_size_limit, make_checkpoints, make_tiny, save, train_and_save
from trainer.checkpoints import checkpoints as checkpoint
from trainer.checkpoints import state as checkpoint_state
from trainer.checkpoints.checkpoints import BACKOFF, copy_model_files
from trainer.checkpoints.export import export_checkpoint, newest_checkpoint
from trainer.checkpoints.manifest import MANIFEST_NAME, read_manifest, verify_files
from trainer.checkpoints.state import TrainState, file_numbers, load_tensors, load_weights, save_tensors
from trainer.cli import run
from trainer.config.model import OptimizerConfig
from trainer.optimizer import make_optimizer
from trainer.step.report import TrainProgress

TENSORS_NAME = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_resumed_training_goes_on_exactly_as_if_never_stopped(root, model_path):
    straight = make_tiny()
    train_and_save(straight, make_checkpoints(root, model_path), range(1, 4))
    for _ in range(3):
        straight.step()

    resumed = make_tiny(seed=1)
    progress = make_checkpoints(root, model_path).resume(resumed)
    for _ in range(3):
        resumed.step()

    assert progress == TrainProgress(step=3)
    expected = straight.state()
    assert expected.keys() == resumed.state().keys()
    for name, value in resumed.state().items():
        assert torch.equal(value, expected[name]), name


def test_a_run_without_checkpoints_starts_at_step_zero_and_keeps_its_weights(root, model_path):
    tiny = make_tiny()
    before = tiny.state()
    assert make_checkpoints(root, model_path).resume(tiny) == TrainProgress()
    assert all(torch.equal(value, before[name]) for name, value in tiny.state().items())


def test_manifest_lists_every_file_and_is_the_last_one(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 2))
    folder = root / "step-00000001"
    manifest = read_manifest(folder)
    assert sorted(entry.path for entry in manifest.files) == [
        name for name in files_of(folder) if name != MANIFEST_NAME
    ]
    assert (manifest.step, manifest.run_id, manifest.world_size) == (1, "run", 1)
    verify_files(folder, manifest.files)
    newest = max(folder.rglob("*"), key=lambda path: path.stat().st_mtime_ns if path.is_file() else 0)
    assert newest.name == MANIFEST_NAME


def test_only_the_newest_checkpoints_stay(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path, keep=2), range(1, 6))
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
@pytest.mark.parametrize("name", [TENSORS_NAME, "progress.json", "hf/config.json", MANIFEST_NAME])
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_is_used(root, model_path, name, how):
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path)
    train_and_save(tiny, checkpoints, range(1, 2))
    expected = tiny.state()
    train_and_save(tiny, checkpoints, range(2, 3))
    damage(root / "step-00000002" / name, how)

    other = make_tiny(seed=1)
    assert make_checkpoints(root, model_path).resume(other) == TrainProgress(step=1)
    assert all(torch.equal(value, expected[key]) for key, value in other.state().items())


@pytest.mark.parametrize("name", [TENSORS_NAME, "progress.json", MANIFEST_NAME])
def test_a_run_whose_checkpoints_are_all_damaged_is_refused(root, model_path, name):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 3))
    for folder in root.glob("step-*"):
        damage(folder / name, "delete")
    with pytest.raises(UserError, match=r"no valid checkpoint .*step-00000002: .*restore a checkpoint"):
        make_checkpoints(root, model_path).resume(make_tiny())


def test_a_run_whose_checkpoints_are_gone_is_refused(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 2))
    shutil.rmtree(root / "step-00000001")
    with pytest.raises(UserError, match="all folders are gone"):
        make_checkpoints(root, model_path).resume(make_tiny())


def test_a_first_save_that_never_ended_is_a_fresh_start(root, model_path):
    """Nothing was committed, so the orchestrator still has every batch."""
    (root / "step-00000001").mkdir(parents=True)
    (root / "step-00000001" / "progress.json").write_text("{}")
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path)
    assert checkpoints.resume(tiny) == TrainProgress()
    train_and_save(tiny, checkpoints, range(1, 2))
    assert checkpoints.resume(tiny) == TrainProgress(step=1)


def test_a_checkpoint_of_another_run_is_not_used(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path, run_id="other"), range(1, 2))
    with pytest.raises(UserError, match="belongs to run 'other'"):
        make_checkpoints(root, model_path).resume(make_tiny())


def test_a_checkpoint_under_another_step_is_not_used(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 2))
    (root / "step-00000001").rename(root / "step-00000009")
    with pytest.raises(UserError, match="its manifest is that of step 1"):
        make_checkpoints(root, model_path).resume(make_tiny())


def test_a_checkpoint_of_an_older_format_is_refused_with_what_to_do(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 2))
    path = root / "step-00000001" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format":3', '"format":2'))
    with pytest.raises(
        UserError, match=r"step-00000001: has format 2, .* go on with the version that wrote it"
    ) as raised:
        make_checkpoints(root, model_path).resume(make_tiny())
    assert "start another --run.name" in str(raised.value)
    assert path.exists(), "it stays for the version that can read it"


def test_a_failed_save_keeps_the_older_one_and_is_due_again_at_once(root, model_path):
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path, interval_steps=10)
    train_and_save(tiny, checkpoints, range(1, 2))
    (root / "step-00000002").write_text("in the way")

    assert not checkpoints.due(2)
    assert not save(checkpoints, tiny, 2)
    assert checkpoints.due(3)
    assert make_checkpoints(root, model_path).resume(tiny) == TrainProgress(step=1)
    assert save(checkpoints, tiny, 3)
    assert not checkpoints.due(4)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_fails_the_save_and_not_the_run(root, model_path, background):
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path, background=background, interval_steps=10)
    train_and_save(tiny, checkpoints, range(1, 2))
    with file_size_limit(2_000):
        assert not save(checkpoints, tiny, 2)
    assert not (root / "step-00000002").exists(), "what it wrote takes the room that the next one needs"
    assert make_checkpoints(root, model_path).resume(tiny) == TrainProgress(step=1)
    assert checkpoints.due(3)
    assert save(checkpoints, tiny, 3)
    assert not checkpoints.due(4)


def test_the_same_step_is_saved_again_after_a_pause_only(root, model_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    tiny = make_tiny()
    monkeypatch.setattr(checkpoint, "MAX_FAILURES", 9)
    checkpoints = make_checkpoints(root, model_path)
    with file_size_limit(2_000):
        for step in (1, 2, 3, 3, 3, 3, 3, 3):
            assert not save(checkpoints, tiny, step)
    assert pauses == [*(BACKOFF.first_s * 2**power for power in (2, 3, 4, 5)), BACKOFF.longest_s]


@pytest.mark.parametrize("background", [False, True])
def test_too_many_failed_saves_in_a_row_end_the_run(root, model_path, background):
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path, background=background)
    with file_size_limit(2_000):
        assert not save(checkpoints, tiny, 1)
        assert not save(checkpoints, tiny, 2)
        with pytest.raises(StorageError, match="3 checkpoints in a row"):
            save(checkpoints, tiny, 3)


def test_a_background_save_has_the_state_at_its_begin_whatever_training_does_meanwhile(root, model_path):
    tiny = make_tiny()
    checkpoints = make_checkpoints(root, model_path, background=True)
    assert checkpoints.saved(wait=True) is None, "nothing is begun"
    tiny.step()
    expected = tiny.state()
    checkpoints.begin(tiny, TrainProgress(step=1))
    tiny.step()
    assert checkpoints.saved(wait=True) == 1
    assert checkpoints.saved(wait=True) is None, "the end is told once"
    resumed = make_tiny(seed=1)
    assert make_checkpoints(root, model_path).resume(resumed) == TrainProgress(step=1)
    for name, value in resumed.state().items():
        assert torch.equal(value, expected[name]), name


def test_newest_json_names_the_last_complete_step(root, model_path):
    train_and_save(make_tiny(), make_checkpoints(root, model_path), range(1, 4))
    assert json.loads((root / "newest.json").read_text()) == {"step": 3}


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
