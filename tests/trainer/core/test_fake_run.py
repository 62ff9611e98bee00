"""The whole trainer on fake data: mini-batches, epochs, weighting, a loss by name and the token export in one run."""

import json
from pathlib import Path

import pytest

from trainer.cli import run
from trainer.observe.token_export import STABLE

NUM_STEPS = 2


def fake_run(model: Path, runs: Path, name: str, *flags: str) -> Path:
    common = f"--model.seq-len 64 --health.port 0 --max-steps {NUM_STEPS} --checkpoint.interval-steps 99".split()
    data = ["--data.fake.batch-size", "12", "--data.fake.mean-tokens", "20", "--data.fake.group-size", "4"]
    where = ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, "--no-metrics.tensorboard"]
    assert run([*where, *common, *data, "--optimizer.lr", "1e-3", *flags]) == 0
    return runs / name


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]


def published(run_dir: Path) -> str:
    return json.loads((run_dir / "weights" / f"v{NUM_STEPS:08d}" / "manifest.json").read_text())["digest"]


@pytest.fixture(scope="module")
def full_run(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (
        "--mini-batches 3 --epochs 2 --weighting trajectory --loss.type gspo --token-export.max-sequences-per-step 5"
    )
    return fake_run(model_path, tmp_path_factory.mktemp("runs"), "full", *flags.split())


def test_every_epoch_counts_as_trained(full_run: Path, model_path: Path, tmp_path: Path) -> None:
    once = metrics_of(fake_run(model_path, tmp_path, "plain"))
    twice = metrics_of(full_run)
    assert len(once) == len(twice) == NUM_STEPS
    for plain, full in zip(once, twice, strict=True):
        assert plain["samples/global"] == 12
        for name in ("tokens", "loss_tokens", "samples"):
            assert full[f"{name}/global"] == 2 * plain[f"{name}/global"]
        assert full["reward/fake/mean"] == pytest.approx(plain["reward/all/mean"])
        assert full["micro_batch_max_tokens"] == 64 >= full["micro_batch_tokens/max"]


def test_every_step_is_exported_and_marked(full_run: Path) -> None:
    for step in range(1, NUM_STEPS + 1):
        folder = full_run / "token_export" / f"step-{step:08d}"
        assert (folder / STABLE).is_file()
        assert len((folder / "rank-00000.jsonl").read_text().splitlines()) == 5


def test_the_export_does_not_change_what_is_published(model_path: Path, tmp_path: Path) -> None:
    plain = fake_run(model_path, tmp_path, "run")
    exported = fake_run(model_path, tmp_path / "other", "run", "--token-export.dir", str(tmp_path / "tokens"))
    assert published(plain) == published(exported)
    assert (tmp_path / "tokens" / "step-00000001" / STABLE).is_file()
    assert not (plain / "token_export").exists() or not list((plain / "token_export").iterdir())
