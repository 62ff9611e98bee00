"""Whole runs of the trainer on recorded batches with images: metrics, refused samples, publishes, resuming, export."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.trainer.images.tiny_vlm import MIXED, draw
from tests.trainer.model.image_ranks import FAMILIES, without_an_image_token
from tests.trainer.runs import replay, weight_bytes, weights_of
from trainer.cli import run
from transport.durable import write_durably
from transport.outbox.batch_file import file_chunks
from transport.outbox.outbox import batch_path
from transport.wire.batch import build_batch

NUM_STEPS = 3
SPOILED = 1
"""Row of step 2 whose images do not add up."""
SHORT = ("--model.seq-len", "10")
"""Cuts three samples, one of them (the last) before its third image, at token 7."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    for step in range(1, NUM_STEPS + 1):
        samples = [draw(drawing, index, seed=step, run_id="images") for index, drawing in enumerate(MIXED)]
        if step == 2:
            samples[SPOILED] = without_an_image_token(samples[SPOILED])
        write_durably(batch_path(folder, step), file_chunks(build_batch("images", step, samples)))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def trained(
    request: pytest.FixtureRequest,
    model_paths: dict[str, Path],
    recording: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """(model, run directory)."""
    model = model_paths[request.param]
    return model, replay(
        model,
        recording,
        tmp_path_factory.mktemp("runs"),
        "images",
        "--token-export.max-sequences-per-step",
        "99",
        *SHORT,
    )


def test_metrics_count_images_and_the_sample_that_was_left_out(trained: tuple[Path, Path]) -> None:
    rows = [json.loads(line) for line in (trained[1] / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert [row["samples/global"] for row in rows] == [9, 8, 9]
    assert [row.get("samples_refused/global", 0) for row in rows] == [0, 1, 0]
    assert [row["images/global"] for row in rows] == [10, 9, 10]
    assert [row["image_tokens/global"] for row in rows] == [25, 21, 25]
    assert [row["image_patches/global"] for row in rows] == [100, 84, 100]
    assert (trained[1] / "logs" / "trainer.log").read_text().count(
        "step 2 leaves out row 1: reverse/0/0#1 of example"
    ) == 1


def test_token_records_end_where_the_sample_was_cut(trained: tuple[Path, Path]) -> None:
    (file,) = (trained[1] / "token_export" / "step-00000003").glob("*.jsonl")
    lengths = {record["row"]: len(record["token_ids"]) for record in map(json.loads, file.read_text().splitlines())}
    assert lengths == {0: 9, 1: 10, 2: 10, 3: 5, 4: 8, 5: 9, 6: 10, 7: 8, 8: 7}


def test_a_run_in_two_parts_ends_with_the_weights_of_one(
    trained: tuple[Path, Path], recording: Path, tmp_path: Path
) -> None:
    model, straight = trained
    replay(model, recording, tmp_path, "parts", "--max-steps", "1", *SHORT)
    assert weight_bytes(replay(model, recording, tmp_path, "parts", *SHORT), NUM_STEPS) == weight_bytes(
        straight, NUM_STEPS
    )


def test_an_export_loads_with_the_published_weights_in_both_towers(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, run_dir = trained
    assert run(["export", "--run", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    exported, loading = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    published, start = weights_of(run_dir, NUM_STEPS), AutoModelForImageTextToText.from_pretrained(model).state_dict()
    assert published.keys() == start.keys() - {"lm_head.weight"}  # tied to the embedding
    for name, weight in exported.named_parameters():
        assert torch.equal(published[name], weight.detach()), name
        assert not torch.equal(published[name], start[name]), name


def test_qwen3_5_trains_packed(model_paths: dict[str, Path], recording: Path, tmp_path: Path) -> None:
    run_dir = replay(model_paths["qwen3_5"], recording, tmp_path, "packed", "--max-steps", "1")
    (row,) = [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert row["micro_batches/global"] < row["samples/global"]


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_critic_sees_the_images_too(trunk: str, model_paths: dict[str, Path], tmp_path: Path) -> None:
    samples = [draw(drawing, index, run_id="images") for index, drawing in enumerate(MIXED)]
    rewarded = [msgspec.structs.replace(sample, advantages=sample.reward) for sample in samples]
    rewarded[SPOILED] = without_an_image_token(rewarded[SPOILED])
    write_durably(batch_path(tmp_path, 1), file_chunks(build_batch("images", 1, rewarded)))
    run_dir = replay(model_paths["qwen3_vl"], tmp_path, tmp_path / "runs", "critic", "--critic.trunk", trunk)
    (row,) = [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]
    assert row["samples_refused/global"] == 1
    assert "explained_variance/all" in row
