"""Row 14 of the fault list: messages between trainer and orchestrator come twice, late, and in another order."""

from dataclasses import replace

import pytest

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.faults.exactly_once.campaign import Campaign
from tests.faults.exactly_once.evidence import Result

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("faults", "kills"),
    [
        pytest.param(Faults(duplicate=0.2, swap=0.05, replay=0.05), 0, id="undisturbed services"),
        pytest.param(Faults(duplicate=0.2, swap=0.05, replay=0.05), 2, id="killed services"),
    ],
)
def test_repeated_and_reordered_messages_train_no_step_twice_or_out_of_order(
    campaign: Campaign, reference: Result, faults: Faults, kills: int
) -> None:
    with ChaosProxy(campaign.run.port, faults=faults) as proxy:
        campaign.run = replace(campaign.run, trainer_port=proxy.port)
        result, _ = campaign.with_kills({"orchestrator": kills, "trainer": kills})
    assert result == reference
    happened = {name for name, count in proxy.num_faults.items() if count > 3}
    assert happened == {name for name in ("duplicate", "swap", "replay") if getattr(faults, name)}
