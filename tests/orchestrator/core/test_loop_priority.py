"""Threads of the process must not keep the event loop waiting."""

import sys
from collections.abc import Iterator

import pytest

from orchestrator.loop_priority import SWITCH_INTERVAL_S, prefer_event_loop


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_loop_gets_the_interpreter_back_sooner() -> None:
    sys.setswitchinterval(0.005)
    prefer_event_loop()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
