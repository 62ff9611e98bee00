"""What a critic makes of a batch, and its gradient and the actor's, however split: against float64 code.

The trainer with a critic: from its command line to its checkpoints, in one process and on two ranks.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.support.process import Process
from tests.support.ranks import GradientRecorder, RankRun, relative_error
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.critic.critic_cases import CPU, CRITIC_CASES, PlainCritic, critic_samples, train_critic_case
from tests.trainer.rank_worker import part_name
from tests.trainer.runs import RUN_ID, arguments, make_sample, replay, weight_bytes, weights_of
from tests.trainer.scenarios import SEQ_LEN, make_manifest, save_tiny_model
from trainer.checkpoints.export import newest_checkpoint
from trainer.cli import run
from trainer.config.model import CriticConfig, ModelConfig
from trainer.critic.credit import ACTION, NO_ACTION, STEP_START
from trainer.critic.critic import CriticLearner, load_critic
from trainer.critic.values import BatchValues, estimate_values, token_roles
from trainer.errors import CriticMismatch, ModelUnusable
from trainer.images.samples import check_image_samples
from trainer.model.policy import Policy
from trainer.planning.layout import Layout
from trainer.planning.pack import pack, pack_mini_batch
from trainer.planning.plan import plan_step
from transport.durable import write_durably
from transport.outbox.outbox import batch_path, file_chunks
from transport.wire.codec import build_batch
from transport.wire.sample import EncodedTensor, TrainingSample


def estimate_alone(
    policy: Policy, bare_model_path: Path, samples: list[TrainingSample], **config: object
) -> BatchValues:
    critic_config = CriticConfig(**config)  # type: ignore[arg-type]
    critic = load_critic(critic_config, ModelConfig(path=bare_model_path, seq_len=SEQ_LEN), policy, CPU)
    learner = CriticLearner(critic, GradientRecorder(critic), critic_config, 1.0)
    manifest = make_manifest(samples)
    plan = plan_step(manifest, Layout(0, 1, SEQ_LEN, SEQ_LEN))
    by_row = check_image_samples(dict(enumerate(samples)), None, SEQ_LEN).samples
    return estimate_values(learner, policy, manifest, pack_mini_batch(plan, 0, 0, by_row), by_row)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_new_critic_values_everything_at_0_so_that_returns_are_discounted_rewards(
    trunk: str, policy: Policy, bare_model_path: Path
) -> None:
    sample = critic_samples()[1]
    found = estimate_alone(policy, bare_model_path, [sample], trunk=trunk, gamma=0.5, lam=1.0)
    assert not found.values.any()
    expected = sample.reward * 0.5 ** np.arange(sample.num_loss_tokens)[::-1]
    np.testing.assert_allclose(found.credit.returns, expected)


def test_samples_carry_the_advantages_of_their_tokens_and_nothing_elsewhere(
    policy: Policy, bare_model_path: Path
) -> None:
    samples = critic_samples()
    found = estimate_alone(policy, bare_model_path, samples, normalize_advantages=False, lam=1.0)
    by_row = check_image_samples(dict(enumerate(samples)), None, SEQ_LEN).samples
    changed = found.with_advantages(by_row)
    for row, sample in by_row.items():
        advantages = changed[row].advantages
        assert isinstance(advantages, EncodedTensor)
        trained = sample.loss_mask.numpy().copy()
        if sample.rl_weights is not None:
            trained &= sample.rl_weights.numpy() != 0
        np.testing.assert_allclose(advantages.numpy()[trained], sample.reward, rtol=1e-6)
        assert not advantages.numpy()[~trained].any()


def test_a_gap_or_a_token_that_is_not_rl_ends_a_step() -> None:
    sample = critic_samples()[1]
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=np.bool_)
    weights = np.array([1, 1, 1, 1, 1, 1, 0, 1], dtype=np.float32)
    changed = msgspec.structs.replace(sample, loss_mask=EncodedTensor.of(mask), rl_weights=EncodedTensor.of(weights))
    roles = token_roles(pack([changed, changed], [0, 0], [0, 1]))
    assert roles.tolist() == [STEP_START, ACTION, STEP_START, NO_ACTION, STEP_START] * 2


def test_an_advantage_with_a_baseline_is_refused_with_what_to_change(policy: Policy, bare_model_path: Path) -> None:
    samples = critic_samples()
    samples[2] = msgspec.structs.replace(samples[2], advantages=0.25)
    with pytest.raises(CriticMismatch, match=r"row 2 .*'copy'.*advantage.type to 'ppo'"):
        estimate_alone(policy, bare_model_path, samples)
    samples[2] = msgspec.structs.replace(samples[2], rl_weights=EncodedTensor.of(np.zeros(17, dtype=np.float32)))
    estimate_alone(policy, bare_model_path, samples)  # supervised samples have no advantage to speak of


def test_trajectories_with_two_rewards_and_batches_without_actions_are_refused(
    policy: Policy, bare_model_path: Path
) -> None:
    samples = critic_samples()
    samples[2] = msgspec.structs.replace(samples[2], reward=7.0, advantages=7.0)
    with pytest.raises(CriticMismatch, match="another reward than the rest of its trajectory"):
        estimate_alone(policy, bare_model_path, samples)
    supervised = [
        msgspec.structs.replace(
            sample,
            rl_weights=EncodedTensor.of(np.zeros(sample.num_tokens, dtype=np.float32)),
            ce_weights=EncodedTensor.of(np.ones(sample.num_tokens, dtype=np.float32)),
        )
        for sample in critic_samples()
    ]
    with pytest.raises(CriticMismatch, match="no `rl` token"):
        estimate_alone(policy, bare_model_path, supervised)


def test_a_critic_that_does_not_know_the_policys_tokens_is_refused(policy: Policy, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "small", vocab_size=32)
    with pytest.raises(ModelUnusable, match="knows 32 tokens, the policy 64"):
        load_critic(CriticConfig(path=path), ModelConfig(path=tmp_path, seq_len=SEQ_LEN), policy, CPU)


def test_an_own_critic_has_no_language_head_and_a_shared_one_no_trunk(policy: Policy, bare_model_path: Path) -> None:
    model = ModelConfig(path=bare_model_path, seq_len=SEQ_LEN)
    own = load_critic(CriticConfig(), model, policy, CPU)
    assert {name.split(".")[0] for name, _ in own.named_parameters()} == {"trunk", "value_head"}
    assert not any("lm_head" in name for name, _ in own.named_parameters())
    shared = load_critic(CriticConfig(trunk="shared"), model, policy, torch.device("cpu"))
    assert [name for name, _ in shared.named_parameters()] == ["value_head.weight", "value_head.bias"]


def test_a_path_on_a_shared_trunk_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"critic\.path is for a trunk"):
        CriticConfig(trunk="shared", path=tmp_path)


PARTS = [(name, index) for name, case in CRITIC_CASES.items() for index in range(case.mini_batches)]

each_case = pytest.mark.parametrize("name", CRITIC_CASES)

each_part = pytest.mark.parametrize(("name", "mini_batch"), PARTS, ids=[part_name(*part) for part in PARTS])


@pytest.fixture(scope="module")
def plain(bare_model_path: Path) -> dict[str, PlainCritic]:
    return {name: PlainCritic(bare_model_path, case) for name, case in CRITIC_CASES.items()}


@each_case
def test_plain_process_has_the_gradients_of_the_reference(
    name: str, policy: Policy, bare_model_path: Path, plain: dict[str, PlainCritic]
) -> None:
    results = train_critic_case(policy, bare_model_path, CRITIC_CASES[name], 0, 1, None)
    for mini_batch, (report, gradients) in enumerate(results):
        policy_loss, value_loss, expected = plain[name].gradients(mini_batch)
        assert report.metrics["loss"] == pytest.approx(policy_loss, rel=1e-5)
        assert report.metrics["loss/value"] == pytest.approx(value_loss, rel=1e-5)
        assert 0 < report.metrics["is_value_clipped/all/mean"] < 1
        assert relative_error(gradients, expected, "policy.") < 1e-5
        assert relative_error(gradients, expected, "critic.") < 1e-5


@pytest.mark.integration
@each_part
def test_ranks_have_the_gradients_of_the_reference(
    name: str, mini_batch: int, rank_run: RankRun, plain: dict[str, PlainCritic]
) -> None:
    policy_loss, value_loss, expected = plain[name].gradients(mini_batch)
    key = f"critic, {part_name(name, mini_batch)}"
    result = rank_run.results()[key]
    assert result["loss"] == pytest.approx(policy_loss, rel=1e-5)
    assert result["metrics"]["loss/value"] == pytest.approx(value_loss, rel=1e-5)
    assert relative_error(rank_run.gradients(key), expected, "policy.") < 1e-5
    assert relative_error(rank_run.gradients(key), expected, "critic.") < 1e-5


@pytest.mark.integration
def test_ranks_agree_on_the_metrics_of_the_critic(rank_run: RankRun) -> None:
    for name in CRITIC_CASES:
        metrics = [rank_run.results(rank)[f"critic, {name}"]["metrics"] for rank in range(rank_run.world_size)]
        for key in ("loss/value", "explained_variance/all", "value/all/mean", "return/copy/std", "critic/grad_norm"):
            assert len({each[key] for each in metrics}) == 1, key


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
def small_trunk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def straight(small_trunk: str, model_path: Path, rewarded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All steps without an interruption."""
    return replay(
        model_path, rewarded, tmp_path_factory.mktemp("runs"), small_trunk, *PPO, "--critic.trunk", small_trunk
    )


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]


def test_a_resumed_run_ends_with_the_weights_and_values_of_one_without_a_stop(
    small_trunk: str, straight: Path, model_path: Path, rewarded: Path, tmp_path: Path
) -> None:
    flags = (*PPO, "--critic.trunk", small_trunk)
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


def test_a_checkpoint_has_the_critic_and_its_export_does_not(small_trunk: str, straight: Path, tmp_path: Path) -> None:
    folder = newest_checkpoint(straight / "checkpoints")
    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {"critic.value_head.weight", "critic_optimizer.value_head.weight.exp_avg"} <= saved.keys()
    assert ("critic.trunk.embed_tokens.weight" in saved) == (small_trunk == "own")
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
@pytest.mark.parametrize("small_trunk", ["shared"], indirect=True)
def test_two_ranks_train_and_resume_as_one_does(
    small_trunk: str,
    straight: Path,
    model_path: Path,
    rewarded: Path,
    tmp_path: Path,
    start_ranks: Callable[..., list[Process]],
) -> None:
    flags = arguments(
        model_path, tmp_path, "ranks", "--replay", str(rewarded), *PPO, "--critic.trunk", small_trunk, "--max-steps"
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
