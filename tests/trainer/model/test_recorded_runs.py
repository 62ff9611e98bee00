"""Whole runs of the trainer on recorded batches with images: metrics, refused samples, publishes, resuming, export.

A LoRA run from the command line: publishes, checkpoints and exports hold the adapter, and others can load it.
"""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3ForCausalLM

from runtime.errors import UserError
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.images.tiny_vlm import MIXED, draw
from tests.trainer.model.image_ranks import FAMILIES, without_an_image_token
from tests.trainer.runs import RUN_ID, replay, weight_bytes, weights_of
from trainer.checkpoints.export import export_checkpoint, newest_checkpoint
from trainer.checkpoints.state import load_weights
from trainer.cli import run
from trainer.weights.adapter import Adapter, check_same_adapter, read_adapter
from trainer.weights.served import RankShare, make_offer
from transport.durable import write_durably
from transport.outbox.outbox import batch_path, file_chunks
from transport.wire.codec import build_batch
from transport.wire.weights import publish_digest, read_weight_manifest, version_dir

NUM_IMAGE_STEPS = 3

SPOILED = 1
"""Row of step 2 whose images do not add up."""

SHORT = ("--model.seq-len", "10")
"""Cuts three samples, one of them (the last) before its third image, at token 7."""


@pytest.fixture(scope="module")
def image_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image_recording")
    for step in range(1, NUM_IMAGE_STEPS + 1):
        samples = [draw(drawing, index, seed=step, run_id="images") for index, drawing in enumerate(MIXED)]
        if step == 2:
            samples[SPOILED] = without_an_image_token(samples[SPOILED])
        write_durably(batch_path(folder, step), file_chunks(build_batch("images", step, samples)))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def trained(
    request: pytest.FixtureRequest,
    model_paths: dict[str, Path],
    image_recording: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """(model, run directory)."""
    model = model_paths[request.param]
    return model, replay(
        model,
        image_recording,
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
    trained: tuple[Path, Path], image_recording: Path, tmp_path: Path
) -> None:
    model, straight = trained
    replay(model, image_recording, tmp_path, "parts", "--max-steps", "1", *SHORT)
    assert weight_bytes(replay(model, image_recording, tmp_path, "parts", *SHORT), NUM_IMAGE_STEPS) == weight_bytes(
        straight, NUM_IMAGE_STEPS
    )


def test_an_export_loads_with_the_published_weights_in_both_towers(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, run_dir = trained
    assert run(["export", "--run", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    exported, loading = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    published, start = (
        weights_of(run_dir, NUM_IMAGE_STEPS),
        AutoModelForImageTextToText.from_pretrained(model).state_dict(),
    )
    assert published.keys() == start.keys() - {"lm_head.weight"}  # tied to the embedding
    for name, weight in exported.named_parameters():
        assert torch.equal(published[name], weight.detach()), name
        assert not torch.equal(published[name], start[name]), name


def test_qwen3_5_trains_packed(model_paths: dict[str, Path], image_recording: Path, tmp_path: Path) -> None:
    run_dir = replay(model_paths["qwen3_5"], image_recording, tmp_path, "packed", "--max-steps", "1")
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


RANK, ALPHA = 4, 12

LORA = ("--model.lora.rank", str(RANK), "--model.lora.alpha", str(ALPHA))

RARELY = ("--checkpoint.interval-steps", "100")


@pytest.fixture(scope="module")
def lora_run(model_path: Path, recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording trained with an adapter, without interruption."""
    return replay(model_path, recording, tmp_path_factory.mktemp("lora"), RUN_ID, *LORA, *RARELY)


def merged_by_hand(model_path: Path, run_dir: Path) -> Qwen3ForCausalLM:
    """The base model with the last published adapter, by the formula."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    weights = weights_of(run_dir, NUM_STEPS)
    with torch.no_grad():
        for name, module in model.named_modules():
            if f"{name}.lora_A.weight" in weights:
                change = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
                module.weight += ALPHA / RANK * change
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(torch.arange(20)[None]).logits


def test_publish_holds_the_adapter_only_and_its_digest_covers_the_base(lora_run: Path) -> None:
    manifest = read_weight_manifest(version_dir(lora_run / "weights", NUM_STEPS) / "manifest.json")
    assert {entry.name.rsplit(".", 2)[1] for entry in manifest.tensors} == {"lora_A", "lora_B"}
    assert manifest.adapter is not None
    other = msgspec.structs.replace(manifest.adapter, base_digest="0" * 32)
    assert manifest.digest == publish_digest(manifest.tensors, manifest.adapter)
    assert manifest.digest != publish_digest(manifest.tensors, other)


def test_checkpoint_holds_the_adapter_only(lora_run: Path) -> None:
    checkpoint = newest_checkpoint(lora_run / "checkpoints")
    saved, published = load_weights(checkpoint), weights_of(lora_run, NUM_STEPS)
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)


def test_resumed_run_ends_with_the_same_bytes(
    lora_run: Path, model_path: Path, recording: Path, tmp_path: Path
) -> None:
    replay(model_path, recording, tmp_path, RUN_ID, *LORA, "--max-steps", "2")
    resumed = replay(model_path, recording, tmp_path, RUN_ID, *LORA, *RARELY)
    assert weight_bytes(resumed, NUM_STEPS) == weight_bytes(lora_run, NUM_STEPS)


@pytest.mark.parametrize("flags", [(), ("--model.lora.rank", "5", "--model.lora.alpha", str(ALPHA))])
def test_run_that_began_with_another_adapter_or_none_is_refused(
    lora_run: Path, model_path: Path, recording: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    shutil.copytree(lora_run, tmp_path / RUN_ID)
    with pytest.raises(UserError, match=r"holds an adapter .*choose another --run.name"):
        replay(model_path, recording, tmp_path, RUN_ID, *flags)


def test_adapter_of_another_base_does_not_go_on(lora_run: Path) -> None:
    checkpoint = newest_checkpoint(lora_run / "checkpoints")
    adapter = read_adapter(checkpoint)
    assert isinstance(adapter, Adapter)
    check_same_adapter(checkpoint, adapter, msgspec.structs.replace(adapter, base_path="/elsewhere"))
    with pytest.raises(UserError, match="base_digest"):
        check_same_adapter(checkpoint, adapter, msgspec.structs.replace(adapter, base_digest="0" * 32))
    with pytest.raises(UserError, match="holds a whole model and the config trains an adapter"):
        check_same_adapter(checkpoint, None, adapter)


def test_export_is_an_adapter_that_peft_loads(lora_run: Path, model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["export", "--run", str(lora_run), "--out", str(out)]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_path)
    assert not (out / "config.json").exists()
    assert (out / "tokenizer.json").exists()
    base = AutoModelForCausalLM.from_pretrained(model_path)
    untrained = logits(base)
    loaded = logits(PeftModel.from_pretrained(base, out))
    torch.testing.assert_close(loaded, logits(merged_by_hand(model_path, lora_run)), atol=1e-6, rtol=0)
    assert (loaded - untrained).abs().max() > 1e-3


def test_merged_export_is_a_whole_model(lora_run: Path, model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["export", "--run", str(lora_run), "--out", str(out), "--merged"]) == 0
    expected = logits(merged_by_hand(model_path, lora_run))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, atol=1e-6, rtol=0)


def test_export_merged_with_another_base_is_refused(lora_run: Path, straight_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    export_checkpoint(newest_checkpoint(straight_run / "checkpoints"), other)
    for base, reason in ((other, "trained on another model"), (tmp_path / "nowhere", "say where it is")):
        with pytest.raises(UserError, match=reason):
            export_checkpoint(newest_checkpoint(lora_run / "checkpoints"), tmp_path / "out", merged=True, base=base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_whole_model_has_nothing_to_merge(straight_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave --merged out"):
        export_checkpoint(newest_checkpoint(straight_run / "checkpoints"), tmp_path / "out", merged=True)


def test_zmq_channel_offers_the_adapter(lora_run: Path) -> None:
    """The same manifest, but for the files: what engines check is the same on every channel."""
    manifest = read_weight_manifest(version_dir(lora_run / "weights", NUM_STEPS) / "manifest.json")
    weights = weights_of(lora_run, NUM_STEPS)
    share = RankShare(
        endpoint="tcp://127.0.0.1:1", ranges=[], hashes={entry.name: entry.hash for entry in manifest.tensors}
    )
    offered = make_offer(manifest.run_id, manifest.version, weights, [share], manifest.adapter).manifest
    assert (offered.digest, offered.adapter) == (manifest.digest, manifest.adapter)
