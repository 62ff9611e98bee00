"""A blocked event loop is measured, warned of once, and blamed on the code that blocks it."""

import asyncio
import json
import sys
import time
from collections.abc import Callable

import pytest

from runtime.process.event_loop import MIN_PROBES, TICK_S, LoopLag, blamed


async def probe_until(lag: LoopLag, condition: Callable[[], bool]) -> None:
    probe = asyncio.create_task(lag.probe())
    for _ in range(400):
        if condition():
            break
        await asyncio.sleep(TICK_S / 2)
    else:
        pytest.fail("the condition did not come true within ten seconds")
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)


async def test_blocking_code_is_measured_and_warned_of_once(warnings_seen: list[str]) -> None:
    lag = LoopLag(tick_s=0.001, advice="use workers")
    await probe_until(lag, lambda: len(lag._lags) >= MIN_PROBES)
    assert warnings_seen == []
    blocks = iter(range(6))

    def block() -> bool:
        if next(blocks, None) is None:
            return True
        time.sleep(0.12)
        return False

    await probe_until(lag, block)
    assert lag.p99_s > 0.1
    assert len(warnings_seen) == 1
    assert "event loop lags" in warnings_seen[0]
    assert "use workers" in warnings_seen[0]


def test_blame_is_on_the_innermost_function_that_is_no_library() -> None:
    assert blamed(sys._getframe()).startswith("test_blame_is_on_the_innermost_function_that_is_no_library (test_event")
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    traceback = caught.tb
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert "json" in traceback.tb_frame.f_code.co_filename
    assert blamed(traceback.tb_frame).startswith("test_blame_is_on_the_innermost_function_that_is_no_library")
    assert blamed(None) == ""


async def test_free_loop_is_not_warned_of(warnings_seen: list[str]) -> None:
    now = [0.0]
    lag = LoopLag(clock=lambda: now[0])
    await probe_until(lag, lambda: len(lag._lags) >= 3)
    assert lag.p99_s <= 0.0
    assert warnings_seen == []


async def test_block_is_visible_while_it_lasts_and_gone_with_the_probe() -> None:
    now = [0.0]
    lag = LoopLag(clock=lambda: now[0])
    assert lag.blocked_s == 0.0
    probe = asyncio.create_task(lag.probe())
    await asyncio.sleep(0)
    now[0] = 5.0
    assert lag.blocked_s == pytest.approx(5.0 - TICK_S)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert lag.blocked_s == 0.0
