"""The watchdog ends a process that hangs, and says where; the lag probe warns of a blocked loop."""

import subprocess
import sys
import time
from pathlib import Path

from runtime.health.health import Health
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
