"""The watchdog ends a process that hangs, and says where; the lag probe warns of a blocked loop.

A blocked event loop is measured, warned of once, and blamed on the code that blocks it.

Stop signals while a service loads: there is nothing to finish, so it ends at once, and well.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.health.health import Health
from runtime.process.event_loop import MIN_PROBES, TICK_S, LoopLag, blamed
from runtime.process.shutdown import ending_at_once
from runtime.process.watchdog import Watchdog
from runtime.run_dir.service_lock import read_holder

HANGS = """
import sys, threading, time
from pathlib import Path
from runtime.config.config import LogConfig
from runtime.health.health import Health
from runtime.process.logging import setup_logging
from runtime.run_dir.run_dir import RunDir
from runtime.process.watchdog import Watchdog

def wait_for_a_batch_that_never_comes():
    threading.Event().wait()

run_dir = RunDir(Path(sys.argv[1])).create()
setup_logging("trainer", LogConfig(), run_dir)
health = Health("trainer", stall_timeout_s=0.3)
Watchdog(health, run_dir.logs / "trainer.stacks").start()
for step in range(10):  # longer than the timeout: progress keeps it alive
    time.sleep(0.05)
    health.progress(step=step)
print("alive", flush=True)
with health.waiting("batch 7 from the orchestrator"):
    wait_for_a_batch_that_never_comes()
"""

UNREAD = """
import sys
from pathlib import Path
from loguru import logger
from runtime.config.config import LogConfig
from runtime.health.health import Health
from runtime.process.logging import setup_logging
from runtime.process.event_loop import LoopLag
from runtime.run_dir.run_dir import RunDir
from runtime.process.watchdog import Watchdog
import runtime.process.watchdog

runtime.process.watchdog.BLOCKED_DUMP_S = 0.0  # the warning of a blocked loop must not keep the watchdog either
runtime.process.watchdog.TELL_TIMEOUT_S = 2.0
run_dir = RunDir(Path(sys.argv[1])).create()
setup_logging("trainer", LogConfig(), run_dir)
health = Health("trainer", stall_timeout_s=1.0)
with run_dir.lock("trainer"), Watchdog(health, run_dir.logs / "trainer.stacks", LoopLag(), run_dir=run_dir):
    while True:  # until the pipe is full
        logger.info("x" * 1000)
        health.progress()
"""

BLOCKED_LOOP = """
import asyncio, time
import runtime.process.watchdog
from runtime.health.health import Health
from runtime.process.event_loop import LoopLag
from runtime.process.watchdog import Watchdog

runtime.process.watchdog.BLOCKED_DUMP_S = 0.2

def environment_that_blocks():
    time.sleep(1.0)

async def main():
    lag = LoopLag()
    probe = asyncio.create_task(lag.probe())
    with Watchdog(Health("orchestrator", stall_timeout_s=2.0), loop_lag=lag):
        await asyncio.sleep(0.2)
        environment_that_blocks()
        await asyncio.sleep(0.2)
    probe.cancel()

asyncio.run(main())
"""

LOOP_BLOCKED_FOR_EVER = """
import asyncio, threading
import runtime.process.watchdog
from runtime.health.health import Health
from runtime.process.event_loop import LoopLag
from runtime.process.watchdog import Watchdog

runtime.process.watchdog.BLOCKED_DUMP_S = 0.2

def environment_that_never_returns():
    threading.Event().wait()

async def main():
    lag = LoopLag()
    probe = asyncio.create_task(lag.probe())
    with Watchdog(Health("orchestrator", stall_timeout_s=2.0), loop_lag=lag):
        await asyncio.sleep(0.2)
        environment_that_never_returns()

asyncio.run(main())
"""


def run_program(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=30)


def test_stalled_process_dumps_its_stacks_and_exits_75(tmp_path: Path) -> None:
    done = run_program(HANGS, str(tmp_path))
    assert done.returncode == 75
    assert done.stdout == "alive\n"
    assert "trainer stalled: no progress for" in done.stderr
    assert "waiting for batch 7 from the orchestrator" in done.stderr
    assert "wait_for_a_batch_that_never_comes" in done.stderr
    assert "wait_for_a_batch_that_never_comes" in (tmp_path / "logs" / "trainer.stacks").read_text()
    assert "trainer stalled" in (tmp_path / "logs" / "trainer.log").read_text()


def test_stalled_process_without_a_free_descriptor_exits_75_and_says_why(tmp_path: Path) -> None:
    leak = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\nprint("
    done = run_program(HANGS.replace("print(", leak, 1), str(tmp_path))
    assert done.returncode == 75
    assert "no stacks: [Errno 24] Too many open files" in done.stderr
    assert "trainer stalled: no progress for" in done.stderr


def test_a_process_whose_stderr_nobody_reads_exits_75_too(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", UNREAD, str(tmp_path)], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 75
        finally:
            process.kill()
    assert "in write" in (tmp_path / "logs" / "trainer.stacks").read_text()
    holder = read_holder(tmp_path / "services" / "trainer.lock")
    assert holder is not None
    assert holder.ended.startswith("exit 75: stalled: no progress for")


def test_blocked_loop_is_dumped_once_and_the_process_lives() -> None:
    done = run_program(BLOCKED_LOOP)
    assert done.returncode == 0
    assert done.stderr.count("environment_that_blocks") == 1
    assert done.stderr.count("event loop blocked for") == 1


def test_loop_that_stays_blocked_is_dumped_and_then_ends_the_process() -> None:
    done = run_program(LOOP_BLOCKED_FOR_EVER)
    assert done.returncode == 75
    blocked, _, stalled = done.stderr.partition("event loop blocked for")
    assert "environment_that_never_returns" in blocked
    assert "orchestrator stalled: no progress for" in stalled


def test_stopped_watchdog_watches_no_more() -> None:
    health = Health("trainer", stall_timeout_s=0.2)
    watchdog = Watchdog(health).start()
    watchdog.stop()
    watchdog.stop()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # a watchdog that still lived would end this test process
        time.sleep(0.05)


def test_watchdog_that_was_never_started_can_be_stopped() -> None:
    Watchdog(Health("trainer", stall_timeout_s=1.0)).stop()


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
    me = "test_blame_is_on_the_innermost_function_that_is_no_library"
    assert blamed(sys._getframe()).startswith(f"{me} (test_watchdog")
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    traceback = caught.tb
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert "json" in traceback.tb_frame.f_code.co_filename
    assert blamed(traceback.tb_frame).startswith(me)
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


LOADS = """
import sys, time
from runtime.process.shutdown import Shutdown, ending_at_once
how = sys.argv[1]
leave = lambda: print("left", flush=True)
with ending_at_once():
    if how == "before":
        print("ready", flush=True)
        time.sleep(60)
shutdown = Shutdown()
if how == "requested":
    shutdown.request()
    print("ready", flush=True)
with shutdown.loading(leave):
    if how == "loading":
        print("ready", flush=True)
        time.sleep(60)
print("ready", flush=True)
shutdown.wait(60)
print("graceful", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("before", ""), ("loading", "left"), ("loaded", "graceful")], ids=["before", "loading", "after"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_exit_code_0_in_every_phase(how: str, said: str, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LOADS, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read().strip() == said
        assert process.wait(timeout=10) == 0


def test_stop_that_was_asked_for_before_keeps_loading_from_starting() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS, "requested"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "ready\nleft\n")


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_at_once():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


ASKED = """
import os, signal
from runtime.process.shutdown import Shutdown
shutdown = Shutdown()
shutdown.request()
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never", flush=True)
"""


def test_a_signal_that_comes_after_another_request_to_stop_is_the_first_one() -> None:
    """A rank hears from its peers that all stop, and then from its own machine."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")
