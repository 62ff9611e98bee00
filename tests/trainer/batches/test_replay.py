"""Fake data: the same on every rank and after every restart, and the whole trainer on it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from runtime.errors import UserError
from runtime.health.health import Health
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import RUN_ID, FakeShutdown, make_batch, record_batches, replay, weight_bytes, weights_of
from tests.trainer.tiny import ALONE
from trainer.batches.fake import FakeSource, fake_lengths
from trainer.batches.inbox import Inbox, Reporter
from trainer.batches.replay import ReplaySource
from trainer.batches.source import NoBatch
from trainer.cli import run
from trainer.config.model import ModelConfig
from trainer.config.trainer import DataConfig, FakeDataConfig, TrainerConfig
from trainer.errors import RankMismatch
from trainer.observe.token_export import STABLE
from trainer.ranks import Ranks
from transport.outbox.outbox import batch_path
from transport.outbox.progress import PublishedWeights
from transport.wire.codec import decode_rows
from transport.wire.manifest import BatchManifest
from transport.wire.sample import TrainingSample
from transport.wire.weights import read_weight_manifest


def test_the_same_recording_gives_the_same_weights_bit_for_bit(straight_run, model_path, recording, tmp_path):
    again = replay(model_path, recording, tmp_path, "again")
    for version in range(NUM_STEPS - 2, NUM_STEPS + 1):
        assert weight_bytes(again, version) == weight_bytes(straight_run, version)


def test_training_changes_the_weights_at_every_step(straight_run):
    before, after = weights_of(straight_run, NUM_STEPS - 1), weights_of(straight_run, NUM_STEPS)
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_in_two_parts_ends_with_the_weights_of_one(straight_run, model_path, recording, tmp_path, stop_after):
    flags = ("--checkpoint.interval-steps", "2")
    replay(model_path, recording, tmp_path, "parts", "--max-steps", str(stop_after), *flags)
    run_dir = replay(model_path, recording, tmp_path, "parts", *flags)
    assert weight_bytes(run_dir, NUM_STEPS) == weight_bytes(straight_run, NUM_STEPS)


def test_the_version_that_a_run_starts_from_is_published_too(model_path, recording, tmp_path):
    run_dir = replay(model_path, recording, tmp_path, "start", "--max-steps", "1")
    assert (run_dir / "weights" / "v00000000" / "model-00001-of-00001.safetensors").read_bytes() == (
        model_path / "model.safetensors"
    ).read_bytes()
    shutil.rmtree(run_dir / "weights")
    (run_dir / "weights").mkdir()
    replay(model_path, recording, tmp_path, "start", "--max-steps", "1")
    assert read_weight_manifest(run_dir / "weights" / "v00000001" / "manifest.json").version == 1


def test_every_step_has_a_row_of_metrics(straight_run):
    rows = [json.loads(line) for line in (straight_run / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert row["samples/global"] == 8
        assert row["lr"] == pytest.approx(1e-3)
        assert {"loss", "grad_norm", "reward/all/mean", "staleness/max", "time/step_s", "tokens_per_s"} <= row.keys()


def test_the_log_has_one_line_per_step_and_says_how_to_export(straight_run):
    lines = (straight_run / "logs" / "trainer.log").read_text().splitlines()
    assert sum(" | loss " in line for line in lines) == NUM_STEPS
    assert any("trainer export --checkpoint" in line for line in lines)


def test_an_outbox_is_replayed_with_its_retired_batches(straight_run, model_path, recording, tmp_path):
    outbox = tmp_path / "outbox"
    (outbox / "retired").mkdir(parents=True)
    for step in range(1, NUM_STEPS + 1):
        kept = outbox / "retired" if step < NUM_STEPS else outbox
        shutil.copy(batch_path(recording, step), kept)
    again = replay(model_path, outbox, tmp_path, "again")
    assert weight_bytes(again, NUM_STEPS) == weight_bytes(straight_run, NUM_STEPS)


def test_a_gap_in_the_recording_is_named(tmp_path):
    batch_path(record_batches(tmp_path, RUN_ID, 3), 2).unlink()
    source = ReplaySource(tmp_path)
    assert source.manifest(3).step == 3
    assert source.manifest(4) is NoBatch.END
    with pytest.raises(UserError, match="has steps 1 to 3, but not step 2"):
        source.manifest(2)


def test_a_damaged_recording_is_named(tmp_path):
    path = batch_path(record_batches(tmp_path, RUN_ID, 1), 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    source = ReplaySource(tmp_path)
    with pytest.raises(UserError, match=r"cannot replay: .*corrupt"):
        source.samples(source.manifest(1), [7])


def test_an_empty_folder_is_nothing_to_replay(tmp_path: Path):
    with pytest.raises(UserError, match="nothing to replay"):
        ReplaySource(tmp_path)


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


NUM_FAKE_STEPS = 2


def fake_run(model: Path, runs: Path, name: str, *flags: str) -> Path:
    common = f"--model.seq-len 64 --health.port 0 --max-steps {NUM_FAKE_STEPS} --checkpoint.interval-steps 99".split()
    data = ["--data.fake.batch-size", "12", "--data.fake.mean-tokens", "20"]
    where = ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, "--no-metrics.tensorboard"]
    assert run([*where, *common, *data, "--optimizer.lr", "1e-3", *flags]) == 0
    return runs / name


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]


def published(run_dir: Path) -> str:
    return json.loads((run_dir / "weights" / f"v{NUM_FAKE_STEPS:08d}" / "manifest.json").read_text())["digest"]


@pytest.fixture(scope="module")
def full_run(bare_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = (
        "--mini-batches 3 --epochs 2 --weighting trajectory --loss.type gspo --token-export.max-sequences-per-step 5"
    )
    return fake_run(bare_model_path, tmp_path_factory.mktemp("runs"), "full", *flags.split())


def test_every_epoch_counts_as_trained(full_run: Path, bare_model_path: Path, tmp_path: Path) -> None:
    once = metrics_of(fake_run(bare_model_path, tmp_path, "plain"))
    twice = metrics_of(full_run)
    assert len(once) == len(twice) == NUM_FAKE_STEPS
    for plain, full in zip(once, twice, strict=True):
        assert plain["samples/global"] == 12
        for name in ("tokens", "loss_tokens", "samples"):
            assert full[f"{name}/global"] == 2 * plain[f"{name}/global"]
        assert full["reward/fake/mean"] == pytest.approx(plain["reward/all/mean"])
        assert full["micro_batch_max_tokens"] == 64 >= full["micro_batch_tokens/max"]


def test_every_step_is_exported_and_marked(full_run: Path) -> None:
    for step in range(1, NUM_FAKE_STEPS + 1):
        folder = full_run / "token_export" / f"step-{step:08d}"
        assert (folder / STABLE).is_file()
        assert len((folder / "rank-00000.jsonl").read_text().splitlines()) == 5


def test_the_export_does_not_change_what_is_published(bare_model_path: Path, tmp_path: Path) -> None:
    plain = fake_run(bare_model_path, tmp_path, "run")
    exported = fake_run(bare_model_path, tmp_path / "other", "run", "--token-export.dir", str(tmp_path / "tokens"))
    assert published(plain) == published(exported)
    assert (tmp_path / "tokens" / "step-00000001" / STABLE).is_file()
    assert not (plain / "token_export").exists() or not list((plain / "token_export").iterdir())


@dataclass
class StoredBatches:
    """A source of `num_batches` batches that remembers what it was told."""

    num_batches: int
    told: list[str] = field(default_factory=list)

    def manifest(self, step: int) -> BatchManifest | NoBatch:
        return make_batch(RUN_ID, step).manifest if step <= self.num_batches else NoBatch.END

    def samples(self, manifest: BatchManifest, rows: Sequence[int]) -> Sequence[TrainingSample]:
        batch = make_batch(RUN_ID, manifest.step)
        return decode_rows(batch.manifest, rows, [batch.frames[row] for row in rows])

    def published(self, weights: PublishedWeights) -> None:
        self.told.append(f"published {weights.version}")

    def trained(self, step: int) -> None:
        self.told.append(f"trained {step}")

    def committed(self, step: int) -> None:
        self.told.append(f"committed {step}")

    def close(self, reason: str) -> None:
        self.told.append(reason)


@dataclass(frozen=True)
class TwoRanks(Ranks):
    """This rank, and one that says `other`; an empty `other` repeats what this rank says."""

    other: bytes = b""

    def gather(self, data: bytes) -> list[bytes]:
        return [data, self.other or data]


def inbox(source: StoredBatches, ranks: Ranks = ALONE, max_steps: int | None = None, stop: bool = False) -> Inbox:
    return Inbox(source, ranks, max_steps=max_steps, stop=FakeShutdown(lambda: stop), health=Health("trainer", 900))


def test_batches_come_in_order_from_the_step_after_the_checkpoint_to_the_end():
    box = inbox(StoredBatches(4))
    assert [batch.step for batch in box.batches(after=2)] == [3, 4]
    assert box.ended


def test_the_run_ends_at_max_steps_without_asking_for_more():
    box = inbox(StoredBatches(4), max_steps=3)
    assert [batch.step for batch in box.batches(after=0)] == [1, 2, 3]
    assert box.ended


def test_a_stop_request_ends_before_the_next_batch_and_is_not_the_end_of_the_run():
    box = inbox(StoredBatches(4), stop=True)
    assert list(box.batches(after=0)) == []
    assert not box.ended


def test_a_stop_request_of_another_rank_stops_this_one_too():
    box = inbox(StoredBatches(4), TwoRanks(0, 2, torch.device("cpu"), other=b"stop"))
    assert list(box.batches(after=0)) == []
    assert not box.ended


@pytest.mark.parametrize("other", [b"end", b"another digest"])
def test_ranks_that_hold_different_batches_do_not_train(other):
    box = inbox(StoredBatches(4), TwoRanks(0, 2, torch.device("cpu"), other=other))
    with pytest.raises(RankMismatch, match=r"batch 1: rank 0: .*rank 1: "):
        list(box.batches(after=0))


def test_a_rank_fetches_only_the_rows_it_asks_for():
    box = inbox(StoredBatches(1))
    (batch,) = box.batches(after=0)
    samples = box.fetch(batch, [5, 2])
    assert {row: sample.trajectory_id[-2:] for row, sample in samples.items()} == {5: "#5", 2: "#2"}


@pytest.mark.parametrize(
    ("rank", "told"),
    [(0, ["published 3", "trained 3", "committed 3", "bye"]), (1, ["trained 3", "committed 3", "bye"])],
)
def test_the_first_rank_publishes_and_every_link_knows_what_is_trained_and_committed(rank, told, tmp_path):
    source = StoredBatches(1)
    ranks = TwoRanks(rank, 2, torch.device("cpu"))
    reporter = Reporter(source, ranks, stop=FakeShutdown(), health=Health("trainer", 900))
    reporter.published(PublishedWeights(version=3, location="v3", digest="digest"))
    reporter.trained(3)
    reporter.committed(3)
    inbox(source, ranks).close("bye")
    assert source.told == told
