"""Rows 1 and 2 of the fault list: one run killed at every sign; `--kills 200` adds runs killed at random instants."""

import random
from dataclasses import replace

import pytest

from orchestrator.records.ledger_report import report_ledger
from tests.faults.conftest import Figures, Record
from tests.faults.exactly_once.kills import RUN_OVER, Aim, Campaign, Reference, every_aim, random_aim, random_end
from tests.faults.exactly_once.signs import SIGNS, Result

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


KILLS_PER_RUN = 7
"""Of each service in a run with random kills, besides one at the end in every other run."""
SEED = 1


@pytest.mark.long
def test_killed_services_end_with_the_weights_of_an_undisturbed_run(
    campaign: Campaign, reference: Reference, kills: int | None, record: Record
) -> None:
    expected = reference.after(campaign.run.max_steps)
    result, ended = campaign.with_kills({service: every_aim(service) for service in SIGNS})
    assert result == expected
    assert min(counter.total() for counter in ended.hits.values()) >= 3, "the run was over before it was disturbed"
    assert campaign.accounts[0].num_cancelled > 0, "no kill hit a rollout in flight"
    assert report_ledger(campaign.run.folder / "killed-1") == 0
    draw = random.Random(SEED)
    while left := left_to_kill(campaign, kills or 0):
        plan = {service: random_aims(service, left.get(service, 0), campaign.num_runs, draw) for service in SIGNS}
        result, _ = campaign.with_kills(plan)
        assert result == expected, f"run {campaign.num_runs}"
    record("exactly_once", figures(campaign, expected))


def left_to_kill(campaign: Campaign, num_kills: int) -> dict[str, int]:
    """Kills of each service that are still to come, half of `num_kills` each; empty when all are done."""
    goal = num_kills // len(SIGNS)
    return {service: goal - done for service in SIGNS if (done := campaign.num_killed(service)) < goal}


def random_aims(service: str, left: int, run: int, draw: random.Random) -> list[Aim]:
    """Kills of `service` in run number `run`, of which `left` are still to come."""
    aims = [random_aim(service, draw) for _ in range(min(KILLS_PER_RUN, left))]
    return [*aims, random_end(draw)] if run % 2 and left > KILLS_PER_RUN else aims


def figures(campaign: Campaign, expected: Result) -> Figures:
    """Of all runs with kills; each ended as expected."""
    accounts = campaign.accounts
    num_due = campaign.run.max_steps * len(accounts)
    return {
        "kills": sum(campaign.num_killed(service) for service in SIGNS),
        "kills_by_service": {service: campaign.num_killed(service) for service in SIGNS},
        "kills_by_instant": {service: dict(counter.most_common()) for service, counter in campaign.hits.items()},
        "runs_bit_equal_to_the_run_without_kills": campaign.num_runs,
        "steps_per_run": campaign.run.max_steps,
        "steps_between_checkpoints": campaign.run.checkpoint_steps,
        "steps_lost": num_due - sum(len(set(account.lineage)) for account in accounts),
        "steps_trained_twice": sum(len(account.lineage) - len(set(account.lineage)) for account in accounts),
        "steps_taken_back_and_trained_again": sum(account.num_vain_steps for account in accounts),
        "rollouts_generated_again": sum(account.num_cancelled for account in accounts),
        "starts_that_paid_for_imports": {service: nursery.num_cold for service, nursery in campaign.nurseries.items()},
        "sha256_of_the_weights": expected.weights,
        "sha256_of_the_training_state": expected.state,
        "seed": SEED,
    }


def test_services_killed_at_the_end_come_back_and_end(campaign: Campaign, reference: Reference) -> None:
    campaign.run = replace(campaign.run, max_steps=6)
    result, ended = campaign.with_kills({service: [Aim(0.0, RUN_OVER)] for service in SIGNS})
    assert result == reference.after(6)
    assert ended.hits["orchestrator"][RUN_OVER] + ended.hits["trainer"][RUN_OVER] >= 1
