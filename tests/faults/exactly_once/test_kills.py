"""Rows 1 and 2 of the fault list, time-boxed. The long form is `python -m benchmarks.faults exactly-once`."""

from dataclasses import replace

import pytest

from orchestrator.ledger_report import report_ledger
from tests.faults.exactly_once.campaign import Campaign, Reference
from tests.faults.exactly_once.kills import RUN_OVER, Aim, every_aim
from tests.faults.exactly_once.signs import SIGNS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_killed_services_end_with_the_weights_of_an_undisturbed_run(campaign: Campaign, reference: Reference) -> None:
    result, ended = campaign.with_kills({service: every_aim(service) for service in SIGNS})
    assert result == reference.after(campaign.run.max_steps)
    assert min(counter.total() for counter in ended.hits.values()) >= 3, "the run was over before it was disturbed"
    assert campaign.accounts[0].num_cancelled > 0, "no kill hit a rollout in flight"
    assert report_ledger(campaign.run.folder / "killed-1") == 0


def test_services_killed_at_the_end_come_back_and_end(campaign: Campaign, reference: Reference) -> None:
    campaign.run = replace(campaign.run, max_steps=6)
    result, ended = campaign.with_kills({service: [Aim(0.0, RUN_OVER)] for service in SIGNS})
    assert result == reference.after(6)
    assert ended.hits["orchestrator"][RUN_OVER] + ended.hits["trainer"][RUN_OVER] >= 1
