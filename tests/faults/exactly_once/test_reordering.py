"""Row 14 of the fault list: messages between trainer and orchestrator come twice, late, and in another order."""

from dataclasses import replace

import pytest

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.faults.exactly_once.campaign import Campaign, Reference
from tests.faults.exactly_once.kills import FIRST_ACT, Aim
from tests.faults.exactly_once.signs import SIGNS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "aims",
    [pytest.param((), id="undisturbed"), pytest.param((Aim(0.5, FIRST_ACT), Aim(0.2, FIRST_ACT)), id="killed")],
)
def test_repeated_and_reordered_messages_train_no_step_twice_or_out_of_order(
    campaign: Campaign, reference: Reference, aims: tuple[Aim, ...]
) -> None:
    with ChaosProxy(campaign.run.port, faults=Faults(duplicate=0.3, swap=0.1, replay=0.1)) as proxy:
        campaign.run = replace(campaign.run, trainer_port=proxy.port, max_steps=12)
        result, _ = campaign.with_kills(dict.fromkeys(SIGNS, aims))
    assert result == reference.after(12)
    assert all(proxy.num_faults[fault] for fault in ("duplicate", "swap", "replay"))
