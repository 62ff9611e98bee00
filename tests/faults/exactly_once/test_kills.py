"""Rows 1 and 2 of the fault list, time-boxed. The long form is `python -m benchmarks.faults exactly-once`."""

import pytest

from orchestrator.ledger_report import report_ledger
from tests.faults.exactly_once.campaign import Campaign
from tests.faults.exactly_once.evidence import Result
from tests.faults.exactly_once.kills import RUN_OVER

pytestmark = pytest.mark.integration


def test_killed_services_end_with_the_weights_of_an_undisturbed_run(campaign: Campaign, reference: Result) -> None:
    result, ended = campaign.with_kills({"orchestrator": 5, "trainer": 5})
    assert result == reference
    assert ended.num_starts == {"orchestrator": 6, "trainer": 6}
    assert campaign.accounts[0].num_cancelled > 0, "no kill hit a rollout in flight"
    assert report_ledger(campaign.run.folder / "killed-1") == 0


def test_services_killed_at_the_end_come_back_and_end(campaign: Campaign, reference: Result) -> None:
    result, _ = campaign.with_kills({"orchestrator": 0, "trainer": 0}, end_kills={"orchestrator": 1, "trainer": 1})
    assert result == reference
    assert campaign.hits["orchestrator"][RUN_OVER] + campaign.hits["trainer"][RUN_OVER] >= 1
