"""How a service ends: exit codes, one line for what the user can mend, signals. Real processes, real signals."""

import signal
import subprocess
import sys

import pytest

from runtime.errors import PeerLostError, StallError, StorageError, UserError, find_service_error

RAISES = """
import asyncio, sys
from runtime.errors import *
from runtime.process.service import run_main

async def fail():
    raise PeerLostError("the orchestrator is gone")

async def group():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())
        tasks.create_task(asyncio.sleep(60))

def main(argv):
    match argv[0]:
        case "user": raise UserError("model.path = x\\n  does not exist")
        case "storage": raise StorageError("disk full")
        case "group": asyncio.run(group())
        case "full": raise OSError(28, "No space left on device", "runs/x/config.json")
        case "denied": raise PermissionError(13, "Permission denied", "runs/x/metrics")
        case "bug": raise KeyError("oops")
        case "interrupt": raise KeyboardInterrupt
        case "code": return 77
    return None

run_main("trainer", main)
"""

WAITS = """
import sys, time
from runtime.process.shutdown import Shutdown
shutdown = Shutdown()
print("ready", flush=True)
while not shutdown.wait(30): pass
print("graceful", shutdown.requested, flush=True)
if sys.argv[1] == "hang":
    time.sleep(60)
"""

WAITS_ASYNC = """
import asyncio, sys, time
from runtime.process.shutdown import Shutdown

async def main():
    stop = Shutdown().event()
    print("ready", flush=True)
    if sys.argv[2] == "blocked":
        time.sleep(60)
    async with asyncio.timeout(30):
        await stop.wait()
    print("graceful", flush=True)
    if sys.argv[2] == "hang":
        await asyncio.sleep(60)

if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""

STOPPED_AFTER_THE_LOOP = """
import os, signal
import uvloop
from runtime.process.shutdown import Shutdown

shutdown = Shutdown()

async def main():
    shutdown.event()

uvloop.run(main())
os.kill(os.getpid(), signal.SIGTERM)
print("requested", shutdown.requested)
"""


def run_main(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RAISES, what], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("what", "code", "stderr"),
    [
        ("user", 2, "trainer: model.path = x does not exist\n"),
        ("storage", 74, "trainer: disk full\n"),
        (
            "full",
            74,
            "trainer: the disk refuses to be written: [Errno 28] No space left on device: 'runs/x/config.json'\n",
        ),
        ("denied", 2, "trainer: this user may not touch runs/x/metrics: Permission denied\n"),
        ("group", 76, "trainer: the orchestrator is gone\n"),
        ("interrupt", 130, ""),
        ("code", 77, ""),
        ("fine", 0, ""),
    ],
)
def test_exit_code_and_one_line(what: str, code: int, stderr: str) -> None:
    done = run_main(what)
    assert (done.returncode, done.stderr) == (code, stderr)


def test_bug_has_a_traceback_and_exit_code_1() -> None:
    done = run_main("bug")
    assert done.returncode == 1
    assert "CRITICAL trainer failed: KeyError('oops')" in done.stderr
    assert "Traceback" in done.stderr


def test_stop_signal_between_the_end_of_the_loop_and_of_the_process_is_no_error() -> None:
    command = [sys.executable, "-c", STOPPED_AFTER_THE_LOOP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "requested True\n", "")


def test_service_error_is_found_in_nested_groups() -> None:
    error = UserError("x")
    group = ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [error])])
    assert find_service_error(group) is error
    assert find_service_error(ExceptionGroup("a", [ValueError()])) is None


def test_exit_codes_differ() -> None:
    assert len({kind.exit_code for kind in (UserError, StorageError, StallError, PeerLostError)}) == 4


class Started:
    """A program that printed `ready`."""

    def __init__(self, program: str, *argv: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", program, *argv], stdout=subprocess.PIPE, text=True)
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> int:
        code = self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_is_graceful(number: signal.Signals) -> None:
    started = Started(WAITS, "end")
    started.process.send_signal(number)
    assert started.line() == "graceful True"
    assert started.end() == 0


def test_second_signal_is_immediate() -> None:
    started = Started(WAITS, "hang")
    started.process.send_signal(signal.SIGTERM)
    assert started.line() == "graceful True"
    started.process.send_signal(signal.SIGINT)
    assert started.end() == 128 + signal.SIGINT


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_first_signal_sets_the_event_of_the_loop(loop: str) -> None:
    started = Started(WAITS_ASYNC, loop, "end")
    started.process.send_signal(signal.SIGTERM)
    assert started.line() == "graceful"
    assert started.end() == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_second_signal_ends_an_async_service_at_once(loop: str) -> None:
    started = Started(WAITS_ASYNC, loop, "hang")
    started.process.send_signal(signal.SIGTERM)
    assert started.line() == "graceful"
    started.process.send_signal(signal.SIGTERM)
    assert started.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_second_signal_ends_a_service_whose_loop_is_blocked(loop: str) -> None:
    started = Started(WAITS_ASYNC, loop, "blocked")
    for _ in range(50):  # two signals that come together count as one: send until it is gone
        started.process.send_signal(signal.SIGTERM)
        try:
            started.process.wait(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            continue
    assert started.end() == 128 + signal.SIGTERM
