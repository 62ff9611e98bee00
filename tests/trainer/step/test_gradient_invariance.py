"""The gradient is that of the mean over the global batch, however it is split over ranks, micro batches and rows.

Each scenario on a plain process and on groups of 1, 2 and 4 real ranks, against a float64 reference without our code.
"""

import pytest
import torch

from tests.support.ranks import GradientRecorder, RankRun, relative_error
from tests.trainer.conftest import References
from tests.trainer.rank_worker import part_name, train_scenario
from tests.trainer.scenarios import SCENARIOS
from trainer.model.policy import Policy

PARTS = [(name, mini_batch) for name, scenario in SCENARIOS.items() for mini_batch in range(scenario.mini_batches)]
each_part = pytest.mark.parametrize(("name", "mini_batch"), PARTS, ids=[part_name(*part) for part in PARTS])


@each_part
def test_plain_process_has_the_gradient_of_the_reference(
    name: str, mini_batch: int, policy: Policy, references: References
) -> None:
    loss, expected = references[SCENARIOS[name], mini_batch]
    recorder = GradientRecorder(policy.causal_lm)
    report = train_scenario(policy, recorder, SCENARIOS[name], 0, 1, mini_batch)
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_error(recorder.gradients, expected) < 1e-5


@pytest.mark.integration
@each_part
def test_ranks_have_the_gradient_of_the_reference(
    name: str, mini_batch: int, rank_run: RankRun, references: References
) -> None:
    loss, expected = references[SCENARIOS[name], mini_batch]
    key = part_name(name, mini_batch)
    assert rank_run.results()[key]["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_error(rank_run.gradients(key), expected) < 1e-5


@pytest.mark.integration
@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_on_everything_but_local_counts(name: str, rank_run: RankRun) -> None:
    def shared(rank: int) -> dict[str, float]:
        metrics = rank_run.results(rank)[name]["metrics"]
        return {key: value for key, value in metrics.items() if "/local" not in key}

    assert all(shared(rank) == shared(0) for rank in range(rank_run.world_size))


@pytest.mark.integration
def test_metrics_do_not_depend_on_the_number_of_ranks(rank_run: RankRun, policy: Policy) -> None:
    recorder = GradientRecorder(policy.causal_lm)
    alone = train_scenario(policy, recorder, SCENARIOS["packed"], rank=0, world_size=1).metrics
    together = rank_run.results()["packed"]["metrics"]
    assert together.keys() == alone.keys()
    for key in alone.keys() - {"micro_batches/global", "micro_batch_tokens/max"}:
        if not key.endswith("/local"):
            assert together[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5), key


@pytest.mark.integration
def test_local_counts_add_up_to_the_global_ones(rank_run: RankRun) -> None:
    metrics = [rank_run.results(rank)["packed"]["metrics"] for rank in range(rank_run.world_size)]
    for name in ("tokens", "loss_tokens", "samples", "micro_batches"):
        assert sum(local[f"{name}/local"] for local in metrics) == metrics[0][f"{name}/global"]


@pytest.mark.integration
def test_a_nan_on_one_rank_stops_every_rank_from_stepping_and_leaves_no_trace(rank_run: RankRun) -> None:
    outcomes = [rank_run.results(rank)["poisoned"] for rank in range(rank_run.world_size)]
    expected = {"stepped": False, "unchanged": True, "stepped_after": True, "changed_after": True}
    assert outcomes == [expected] * rank_run.world_size


@pytest.mark.integration
def test_bfloat16_ranks_reduce_in_float32_and_come_near_the_reference(
    rank_run: RankRun, references: References
) -> None:
    _, expected = references[SCENARIOS["packed"], 0]
    gradients = rank_run.gradients("bfloat16")
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert 1e-5 < relative_error(gradients, expected) < 0.1


@pytest.mark.integration
def test_head_of_bfloat16_ranks_does_not_round_logits(rank_run: RankRun) -> None:
    """Unsharded it does not, either: the engines' log probabilities would differ from a rank's otherwise."""
    errors = [rank_run.results(rank)["bfloat16 head"] for rank in range(rank_run.world_size)]
    assert max(errors) < 1e-4


@pytest.mark.integration
def test_ranks_with_checkpointed_activations_have_the_gradient_of_the_reference(
    rank_run: RankRun, references: References
) -> None:
    _, expected = references[SCENARIOS["packed"], 0]
    assert relative_error(rank_run.gradients("checkpointed"), expected) < 1e-5
