"""Actor and critic have the gradient of the global mean, however the batch is split: against plain float64 code."""

from pathlib import Path

import pytest

from tests.support.ranks import RankRun, relative_error
from tests.trainer.core.critic_cases import CRITIC_CASES, PlainCritic, train_critic_case
from tests.trainer.core.rank_worker import part_name
from trainer.model.policy import Policy

PARTS = [(name, index) for name, case in CRITIC_CASES.items() for index in range(case.mini_batches)]
each_case = pytest.mark.parametrize("name", CRITIC_CASES)
each_part = pytest.mark.parametrize(("name", "mini_batch"), PARTS, ids=[part_name(*part) for part in PARTS])


@pytest.fixture(scope="module")
def plain(model_path: Path) -> dict[str, PlainCritic]:
    return {name: PlainCritic(model_path, case) for name, case in CRITIC_CASES.items()}


@each_case
def test_plain_process_has_the_gradients_of_the_reference(
    name: str, policy: Policy, model_path: Path, plain: dict[str, PlainCritic]
) -> None:
    results = train_critic_case(policy, model_path, CRITIC_CASES[name], 0, 1, None)
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
