"""One optimizer step: metrics, clipping, accounting, batches not to be stepped on; progress over steps."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranks import GradientRecorder
from tests.trainer.rank_worker import NO_CLIP, micro_batches_of, train_scenario
from tests.trainer.reference import load_reference, sample_logprobs
from tests.trainer.scenarios import ENV_NAMES, SCENARIOS, SEQ_LEN, Scenario, batch_of, make_sample
from trainer.accounting import Accounting
from trainer.config.loss import DppoLossConfig
from trainer.errors import PlanError
from trainer.images.samples import cut_sample
from trainer.losses.factory import make_loss
from trainer.model.policy import Policy
from trainer.planning.pack import MicroBatch, pack
from trainer.step.report import StepReport, TrainProgress
from trainer.step.step import StepSettings, train_mini_batch
from transport.wire.sample import EncodedTensor

LOSS = make_loss(DppoLossConfig())


def weights(policy: Policy) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def step(policy: Policy, batches: list[MicroBatch], max_grad_norm: float = NO_CLIP, lr: float = 1.0) -> StepReport:
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    return train_mini_batch(policy, optimizer, batches, LOSS, StepSettings(ENV_NAMES, max_grad_norm, SEQ_LEN))


@pytest.fixture(scope="module")
def expected_tokens(bare_model_path) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """Per trained token of the mixed batch, by the plain reference: env, entropy, ratio, mismatch_kl."""
    model = load_reference(bare_model_path)
    columns: dict[str, list[np.ndarray]] = {"env": [], "entropy": [], "ratio": [], "mismatch_kl": []}
    with torch.no_grad():
        for sample in batch_of("mixed"):
            logprobs, entropies = sample_logprobs(model, sample, SEQ_LEN)
            mask = sample.loss_mask.numpy()[1:SEQ_LEN]
            log_ratio = logprobs.numpy()[mask] - sample.logprobs.numpy()[1:SEQ_LEN][mask]
            columns["env"].append(np.full(mask.sum(), sample.env_name))
            columns["entropy"].append(entropies.numpy()[mask])
            columns["ratio"].append(np.exp(log_ratio))
            columns["mismatch_kl"].append(np.exp(log_ratio) - 1 - log_ratio)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


@pytest.mark.parametrize("metric", ["entropy", "ratio", "mismatch_kl"])
def test_token_metrics_equal_the_reference(metric: str, policy: Policy, expected_tokens: dict[str, np.ndarray]) -> None:
    report = train_scenario(policy, GradientRecorder(policy.causal_lm), SCENARIOS["packed"], 0, 1)
    for key in ("all", *ENV_NAMES):
        chosen = expected_tokens[metric][(expected_tokens["env"] == key) | (key == "all")]
        for kind, value in (
            ("mean", chosen.mean()),
            ("std", chosen.std()),
            ("min", chosen.min()),
            ("max", chosen.max()),
        ):
            assert report.metrics[f"{metric}/{key}/{kind}"] == pytest.approx(value, rel=1e-4, abs=1e-5), (key, kind)


def test_sample_metrics_come_from_the_samples(policy: Policy) -> None:
    samples = batch_of("mixed")
    metrics = train_scenario(policy, GradientRecorder(policy.causal_lm), SCENARIOS["packed"], 0, 1).metrics
    lengths = [min(sample.num_tokens, SEQ_LEN) for sample in samples]
    assert metrics["length/all/mean"] == pytest.approx(np.mean(lengths))
    assert metrics["length/all/max"] == SEQ_LEN
    assert metrics["reward/all/mean"] == pytest.approx(np.mean([sample.reward for sample in samples]))
    copy = [sample.advantages for sample in samples if sample.env_name == "copy"]
    assert metrics["advantage/copy/std"] == pytest.approx(np.std(copy), rel=1e-5)
    trained = [int(sample.loss_mask.numpy()[:SEQ_LEN].sum()) for sample in samples]
    assert metrics["trained_length/all/mean"] == pytest.approx(np.mean(trained))


def test_accounting_leaves_out_padding_and_dummies(policy: Policy) -> None:
    batches = [*micro_batches_of(Scenario("mixed", pad_multiple=16), 0, 1), pack([], [], [])]
    report = step(policy, batches)
    samples = batch_of("mixed")
    lengths = [min(sample.num_tokens, SEQ_LEN) for sample in samples]
    assert report.metrics["tokens/local"] == report.metrics["tokens/global"] == sum(lengths)
    assert report.metrics["samples/local"] == len(samples)
    assert report.metrics["loss_tokens/local"] == sum(int(s.loss_mask.numpy()[:SEQ_LEN].sum()) for s in samples)
    assert report.metrics["micro_batches/local"] == len(batches) - 1
    assert report.metrics["micro_batch_tokens/max"] == max(batch.num_tokens for batch in batches) <= SEQ_LEN
    assert report.metrics["micro_batch_max_tokens"] == SEQ_LEN


def test_the_gradient_is_clipped_to_the_norm_and_reported_before_clipping(policy: Policy) -> None:
    before = weights(policy)
    report = step(policy, micro_batches_of(SCENARIOS["packed"], 0, 1), max_grad_norm=0.01)
    moved = torch.stack([(a - b).norm() for a, b in zip(before, weights(policy), strict=True)]).norm()
    assert report.metrics["grad_norm"] > 0.1
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


def test_no_gradient_is_left_behind_and_none_is_carried_in(policy: Policy) -> None:
    batches = micro_batches_of(SCENARIOS["packed"], 0, 1)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    polluted = step(policy, batches, lr=0.0)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert step(policy, batches, lr=0.0).metrics["grad_norm"] == polluted.metrics["grad_norm"]


def test_training_lowers_the_loss(policy: Policy) -> None:
    batches = micro_batches_of(SCENARIOS["packed"], 0, 1)
    first = step(policy, batches, max_grad_norm=1.0, lr=0.02).metrics["loss"]
    for _ in range(4):
        last = step(policy, batches, max_grad_norm=1.0, lr=0.02).metrics["loss"]
    assert last < first


def test_the_same_step_twice_is_bit_equal(policy: Policy) -> None:
    batches = micro_batches_of(SCENARIOS["three components"], 0, 1)
    first, second = GradientRecorder(policy.causal_lm), GradientRecorder(policy.causal_lm)
    settings = StepSettings(ENV_NAMES, NO_CLIP, SEQ_LEN)
    reports = [train_mini_batch(policy, recorder, batches, LOSS, settings) for recorder in (first, second)]
    assert reports[0].metrics == reports[1].metrics
    assert all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


@pytest.mark.parametrize("field", ["logprobs", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stops_the_step(policy: Policy, field: str, value: float) -> None:
    before = weights(policy)
    batches = micro_batches_of(SCENARIOS["packed"], 0, 1)
    poisoned = getattr(batches[-1].loss_tokens, field).clone()
    poisoned[1] = value
    batches[-1] = replace(batches[-1], loss_tokens=replace(batches[-1].loss_tokens, **{field: poisoned}))
    assert not step(policy, batches).stepped
    assert all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_supervised_micro_batches_leave_out_ratio_metrics_and_report_their_own_loss(policy: Policy) -> None:
    zeros, ones = (EncodedTensor.of(np.full(10, value, dtype=np.float32)) for value in (0, 1))
    sample = make_sample(0, 10, np.random.default_rng(0), rl_weights=zeros, ce_weights=ones)
    metrics = step(policy, [pack([sample], [0], [0])]).metrics
    assert not [key for key in metrics if key.startswith(("ratio", "mismatch_kl", "is_masked", "loss/rl"))]
    assert metrics["loss/ce"] == metrics["loss"] > 0
    assert "entropy/all/mean" in metrics


def test_masks_reported_are_those_the_loss_used(policy: Policy) -> None:
    """Raising every behaviour logprob to 0 makes every token of a negative advantage fall by nearly 1."""
    rng = np.random.default_rng(0)
    certain = EncodedTensor.of(np.zeros(10, dtype=np.float32))
    samples = [make_sample(0, 10, rng, logprobs=certain, advantages=-1.0), make_sample(1, 10, rng, advantages=0.0)]
    metrics = step(policy, [pack(samples, [0, 1], [0, 1])]).metrics
    assert metrics["is_masked_low/copy/mean"] == metrics["is_masked/copy/mean"] > 0.5
    assert metrics["is_masked_high/all/max"] == metrics["is_masked/reverse/max"] == 0


def test_a_mini_batch_whose_trained_tokens_were_all_cut_off_is_refused(policy: Policy) -> None:
    sample = make_sample(0, 20, np.random.default_rng(0))
    with pytest.raises(PlanError, match=r"none of the 1 samples has a trained token within seq_len"):
        step(policy, [pack([cut_sample(sample, None, 10)], [0], [0])])


def report(*, stepped: bool = True) -> StepReport:
    trained = Accounting(
        num_tokens=10, num_loss_tokens=5, num_samples=3, num_micro_batches=1, max_micro_batch_tokens=10
    )
    return StepReport(stepped, {}, trained)


def test_progress_adds_up_over_optimizer_steps_and_batches():
    progress = TrainProgress().after(1, [report(), report()]).after(2, [report()])
    assert progress == TrainProgress(step=2, num_samples=9, num_tokens=30)


@pytest.mark.parametrize("step", [1, 3])
def test_a_batch_out_of_order_is_refused(step):
    with pytest.raises(ValueError, match=f"batch {step} does not follow step 1"):
        TrainProgress(step=1).after(step, [report()])


def test_non_finite_steps_are_counted_in_a_row():
    bad = TrainProgress().after(1, [report(stepped=False)]).after(2, [report(), report(stepped=False)])
    assert bad.num_non_finite == 2
    assert bad.after(3, [report()]).num_non_finite == 0


def test_progress_survives_a_round_trip_through_json():
    progress = TrainProgress(step=7, num_samples=2, num_tokens=3, num_non_finite=1)
    assert msgspec.json.decode(msgspec.json.encode(progress), type=TrainProgress) == progress
