"""The trainer with a critic: from its command line to its checkpoints, in one process and on two ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.support.process import Process
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import RUN_ID, arguments, make_sample, replay, weight_bytes, weights_of
from trainer.checkpoints.export import newest_checkpoint
from trainer.cli import run
from trainer.errors import CriticMismatch
from transport.durable import write_durably
from transport.outbox.batch_file import file_chunks
from transport.outbox.outbox import batch_path
from transport.wire.batch import build_batch

PPO = ("--loss.type", "ppo_clip", "--critic.lr", "1e-3", "--mini-batches", "2", "--epochs", "2")


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`NUM_STEPS` batches as an orchestrator with `advantage.type = "ppo"` sends them."""
    folder = tmp_path_factory.mktemp("rewarded")
    for step in range(1, NUM_STEPS + 1):
        samples = [make_sample(RUN_ID, step, index) for index in range(8)]
        samples = [msgspec.structs.replace(sample, advantages=sample.reward) for sample in samples]
        write_durably(batch_path(folder, step), file_chunks(build_batch(RUN_ID, step, samples)))
    return folder


@pytest.fixture(scope="module", params=["own", "shared"])
def trunk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def straight(trunk: str, model_path: Path, rewarded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All steps without an interruption."""
    return replay(model_path, rewarded, tmp_path_factory.mktemp("runs"), trunk, *PPO, "--critic.trunk", trunk)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]


def test_a_resumed_run_ends_with_the_weights_and_values_of_one_without_a_stop(
    trunk: str, straight: Path, model_path: Path, rewarded: Path, tmp_path: Path
) -> None:
    flags = (*PPO, "--critic.trunk", trunk)
    replay(model_path, rewarded, tmp_path, "parts", *flags, "--max-steps", "2")
    resumed = replay(model_path, rewarded, tmp_path, "parts", *flags)
    assert weight_bytes(resumed, NUM_STEPS) == weight_bytes(straight, NUM_STEPS)
    last, expected = metrics_of(resumed)[-1], metrics_of(straight)[-1]
    for key in ("loss/value", "value/all/mean", "explained_variance/all", "critic/grad_norm"):
        assert last[key] == expected[key]


def test_the_critic_learns_the_rewards_and_says_how_well(straight: Path) -> None:
    first, *_, last = metrics_of(straight)
    assert last["value/all/mean"] > first["value/all/mean"], "values start at 0, and rewards are 0.5 on average"
    assert {"is_value_clipped/copy/mean", "return/reverse/std", "explained_variance/copy", "critic/lr"} <= last.keys()
    assert last["time/values_s"] > 0


def test_a_checkpoint_has_the_critic_and_its_export_does_not(trunk: str, straight: Path, tmp_path: Path) -> None:
    folder = newest_checkpoint(straight / "checkpoints")
    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {"critic.value_head.weight", "critic_optimizer.value_head.weight.exp_avg"} <= saved.keys()
    assert ("critic.trunk.embed_tokens.weight" in saved) == (trunk == "own")
    assert run(["export", "--run", str(straight), "--out", str(tmp_path / "model")]) == 0
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == weights_of(straight, NUM_STEPS).keys()


def test_a_checkpoint_without_a_critic_is_refused(model_path: Path, rewarded: Path, tmp_path: Path) -> None:
    replay(model_path, rewarded, tmp_path, "bare", "--max-steps", "1")
    with pytest.raises(Exception, match="was written without a critic"):
        replay(model_path, rewarded, tmp_path, "bare", *PPO)


def test_batches_of_another_advantage_are_refused(model_path: Path, recording: Path, tmp_path: Path) -> None:
    with pytest.raises(CriticMismatch, match="'ppo'"):
        replay(model_path, recording, tmp_path, "mismatch", *PPO)


def test_fake_data_suits_a_critic(model_path: Path, tmp_path: Path) -> None:
    fake = ("--data.fake.batch-size", "4", "--data.fake.mean-tokens", "16", "--max-steps", "1")
    assert run(arguments(model_path, tmp_path, "fake", *fake, "--critic.level", "step")) == 0
    assert "loss/value" in metrics_of(tmp_path / "fake")[-1]


@pytest.mark.integration
@pytest.mark.parametrize("trunk", ["shared"], indirect=True)
def test_two_ranks_train_and_resume_as_one_does(
    trunk: str,
    straight: Path,
    model_path: Path,
    rewarded: Path,
    tmp_path: Path,
    start_ranks: Callable[..., list[Process]],
) -> None:
    flags = arguments(
        model_path, tmp_path, "ranks", "--replay", str(rewarded), *PPO, "--critic.trunk", trunk, "--max-steps"
    )
    for rank in start_ranks(2, *flags, "2"):
        rank.finish(within_s=240)
    assert run([*flags, str(NUM_STEPS)]) == 0  # resumed by one process
    weights, expected = weights_of(tmp_path / "ranks", NUM_STEPS), weights_of(straight, NUM_STEPS)
    assert moved(expected, weights) < 0.1 * moved(expected, load_file(model_path / "model.safetensors"))
    assert metrics_of(tmp_path / "ranks")[-1]["loss/value"] == pytest.approx(
        metrics_of(straight)[-1]["loss/value"], rel=0.05
    )


def moved(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Distance between two sets of weights."""
    return float(torch.stack([(weights[name] - others[name]).square().sum() for name in weights]).sum().sqrt())
