import json
import shutil
from pathlib import Path

import pytest
import torch

from runtime.errors import UserError
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import RUN_ID, record_batches, replay, weight_bytes, weights_of
from trainer.batches.replay import ReplaySource
from trainer.batches.source import NoBatch
from transport.outbox.outbox import batch_path
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
