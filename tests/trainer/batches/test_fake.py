"""Fake data: the same on every rank and after every restart, and the whole trainer on it."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from runtime.errors import UserError
from trainer.batches.fake import FakeSource, fake_lengths
from trainer.batches.source import NoBatch
from trainer.cli import run
from trainer.config.model import ModelConfig
from trainer.config.trainer import DataConfig, FakeDataConfig, TrainerConfig
from trainer.observe.token_export import STABLE
from transport.wire.manifest import BatchManifest

MODEL = ModelConfig(path=Path("model"), seq_len=128)


def source(**changes: object) -> FakeSource:
    config = FakeDataConfig(**{"batch_size": 20, "mean_tokens": 40, **changes})
    return FakeSource(config, "run", seq_len=64, vocab_size=50, seed=7)


def manifest_of(fake: FakeSource, step: int) -> BatchManifest:
    manifest = fake.manifest(step)
    assert not isinstance(manifest, NoBatch)
    return manifest


def test_a_batch_is_the_same_for_every_rank_and_restart_and_another_at_every_step() -> None:
    assert manifest_of(source(), 3).digest == manifest_of(source(), 3).digest
    assert manifest_of(source(), 3).digest != manifest_of(source(), 4).digest


def test_samples_are_those_of_the_manifest() -> None:
    fake = source()
    manifest = manifest_of(fake, 2)
    samples = fake.samples(manifest, [5, 11])
    assert [sample.num_tokens for sample in samples] == manifest.columns.lengths.numpy()[[5, 11]].tolist()
    for sample in samples:
        sample.check()
        assert sample.token_ids.numpy().max() < 50
        assert 0 < sample.num_loss_tokens < sample.num_tokens


def test_groups_have_their_size() -> None:
    groups = manifest_of(source(), 1).columns.groups.numpy()
    assert np.bincount(groups).tolist() == [8, 8, 4]


@pytest.mark.parametrize("lengths", ["fixed", "uniform", "lognormal"])
def test_lengths_have_the_mean_that_was_asked_for_and_stay_below_the_cap(lengths: str) -> None:
    config = FakeDataConfig(batch_size=40_000, lengths=lengths, mean_tokens=100)
    drawn = fake_lengths(config, 10_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(100, rel=0.03)
    assert (len(set(drawn.tolist())) == 1) == (lengths == "fixed")
    assert fake_lengths(config, 64, np.random.default_rng(0)).max() == 64
    assert drawn.min() >= 2


def test_a_micro_batch_cap_has_no_meaning_with_fake_data() -> None:
    with pytest.raises(ValidationError, match=r"micro_batch_max_tokens has no meaning with fake data"):
        TrainerConfig(model=MODEL, data=DataConfig(fake=FakeDataConfig(batch_size=4)), micro_batch_max_tokens=64)


def test_a_batch_comes_from_one_place() -> None:
    with pytest.raises(ValidationError, match=r"replay and data.fake exclude each other"):
        TrainerConfig(model=MODEL, data=DataConfig(fake=FakeDataConfig(batch_size=4)), replay=Path("batches"))


def test_fake_data_needs_a_batch_size() -> None:
    with pytest.raises(UserError, match=r"data.fake.batch_size is required"):
        run(["--model.path", "model", "--data.fake.mean_tokens", "4"])


NUM_STEPS = 2


def fake_run(model: Path, runs: Path, name: str, *flags: str) -> Path:
    common = f"--model.seq-len 64 --health.port 0 --max-steps {NUM_STEPS} --checkpoint.interval-steps 99".split()
    data = ["--data.fake.batch-size", "12", "--data.fake.mean-tokens", "20"]
    where = ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, "--no-metrics.tensorboard"]
    assert run([*where, *common, *data, "--optimizer.lr", "1e-3", *flags]) == 0
    return runs / name


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]


def published(run_dir: Path) -> str:
    return json.loads((run_dir / "weights" / f"v{NUM_STEPS:08d}" / "manifest.json").read_text())["digest"]


@pytest.fixture(scope="module")
def full_run(bare_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (
        "--mini-batches 3 --epochs 2 --weighting trajectory --loss.type gspo --token-export.max-sequences-per-step 5"
    )
    return fake_run(bare_model_path, tmp_path_factory.mktemp("runs"), "full", *flags.split())


def test_every_epoch_counts_as_trained(full_run: Path, bare_model_path: Path, tmp_path: Path) -> None:
    once = metrics_of(fake_run(bare_model_path, tmp_path, "plain"))
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


def test_the_export_does_not_change_what_is_published(bare_model_path: Path, tmp_path: Path) -> None:
    plain = fake_run(bare_model_path, tmp_path, "run")
    exported = fake_run(bare_model_path, tmp_path / "other", "run", "--token-export.dir", str(tmp_path / "tokens"))
    assert published(plain) == published(exported)
    assert (tmp_path / "tokens" / "step-00000001" / STABLE).is_file()
    assert not (plain / "token_export").exists() or not list((plain / "token_export").iterdir())
