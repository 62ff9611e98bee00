"""Who is reachable from other machines without keys or a token says so again and again, not only at the start."""

import threading
from pathlib import Path

import pytest

from inference import service
from inference.config import InferenceConfig
from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN
from transport.outbox.outbox import Outbox
from transport.security import exposure
from transport.security.exposure import reminding_of_exposure
from transport.weights.server import WeightServer, WeightStore

OPEN = "tcp://0.0.0.0:0"
OFTEN_S = 0.01
"""In the place of a minute."""
TIMES = 3
DEADLINE_S = 30.0


def reminders(warnings: list[str]) -> list[str]:
    return [line for line in warnings if "reachable from other machines" in line]


def test_a_minute_is_a_minute() -> None:
    assert exposure.REMINDER_S == 60.0


def test_batch_server(tmp_path: Path, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    with Served(Outbox(tmp_path, RUN), OPEN, insecure=True, park_s=0.02) as served:
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)
        assert reminders(warnings_seen)[-1].startswith(served.endpoint)


def test_weight_server(warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    with WeightServer(OPEN, RUN, WeightStore(1), insecure=True) as open_server:
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)
        assert reminders(warnings_seen)[-1].startswith(open_server.endpoint)


def test_inference_server(warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    config = InferenceConfig(model={"path": "model"}, server={"host": "0.0.0.0", "insecure": True})
    with reminding_of_exposure(service.exposure(config)):
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)


def test_servers_of_this_machine_have_nothing_to_say(warnings_seen: list[str]) -> None:
    num_threads = threading.active_count()
    with reminding_of_exposure(service.exposure(InferenceConfig(model={"path": "model"}))):
        assert threading.active_count() == num_threads
    assert reminders(warnings_seen) == []
