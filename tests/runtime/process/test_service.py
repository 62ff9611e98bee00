"""How a service ends: exit codes, one line for what the user can mend, signals. Real processes, real signals.

Logging of a service, in a process of its own: loguru's logger is one per process.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import PeerLostError, StallError, StorageError, UserError, find_service_error
from runtime.process.logging import LogFile

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


PROGRAM = """
import logging, sys, warnings
from pathlib import Path
from loguru import logger
from runtime.config.config import LogConfig
from runtime.process.logging import PRINTED, setup_logging
from runtime.run_dir.run_dir import RunDir

json_lines, level, rank = sys.argv[2] == "json", sys.argv[3], int(sys.argv[4]) if sys.argv[4] else None
setup_logging("trainer", LogConfig(json_lines=json_lines, level=level), RunDir(Path(sys.argv[1])).create(), rank=rank)
logger.info("step {step} of {{}} <red>", step=3)
logger.debug("detail")
logger.info("an answer: {}", "\\x1b[2Jgone\\u202e")
logging.getLogger("library").warning("old %s", "api")
logging.getLogger("library").info("chatter")
warnings.warn("deprecated thing")
logger.bind(**PRINTED).error("already on stderr")
try:
    secret_value = "hunter2"
    1 / 0
except ZeroDivisionError:
    logger.exception("it broke")
"""


def run_program(tmp_path: Path, form: str = "text", level: str = "INFO", rank: str = "") -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), form, level, rank]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_stderr_has_one_line_per_record(tmp_path: Path) -> None:
    lines = run_program(tmp_path)
    assert lines[0].endswith("INFO     step 3 of {} <red>")
    assert lines[1].endswith("INFO     an answer: \\x1b[2Jgone\\x202e"), "a terminal would obey the answer of a model"
    assert lines[2].endswith("WARNING  library: old api")
    assert "deprecated thing" in lines[3]
    assert not any("detail" in line or "chatter" in line or "already on stderr" in line for line in lines)


def test_log_file_has_the_same_and_what_was_printed_already(tmp_path: Path) -> None:
    run_program(tmp_path)
    text = (tmp_path / "logs" / "trainer.log").read_text()
    assert "step 3 of {} <red>" in text
    assert "ERROR    already on stderr" in text
    assert "ZeroDivisionError" in text


def test_tracebacks_do_not_show_values(tmp_path: Path) -> None:
    lines = run_program(tmp_path)
    assert any("ZeroDivisionError: division by zero" in line for line in lines)
    assert not any("hunter2" in line and "secret_value" not in line for line in lines)


def test_json_lines_are_whole_objects(tmp_path: Path) -> None:
    records = [json.loads(line) for line in run_program(tmp_path, form="json")]
    assert records[0]["message"] == "step 3 of {} <red>"
    assert {"time", "level", "service", "message"} <= set(records[0])
    assert records[0]["service"] == "trainer"
    assert records[-1]["message"] == "it broke"
    assert "ZeroDivisionError" in records[-1]["exception"]


def test_debug_level_lets_libraries_speak(tmp_path: Path) -> None:
    text = "\n".join(run_program(tmp_path, level="DEBUG"))
    assert "detail" in text
    assert "library: chatter" in text


def test_ranks_have_their_own_file_and_say_who_they_are(tmp_path: Path) -> None:
    lines = run_program(tmp_path, rank="1")
    assert lines[0].endswith("[rank 1] step 3 of {} <red>")
    assert (tmp_path / "logs" / "trainer-1.log").exists()
    run_program(tmp_path, rank="0")
    assert (tmp_path / "logs" / "trainer.log").exists()


def test_log_file_rotates_and_keeps_a_bounded_number(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=100, keep=2)
    for number in range(20):
        log.write(f"{number:03} {'x' * 45}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log.1", "a.log.2"]
    assert (tmp_path / "a.log.1").read_text().startswith("018")
    assert (tmp_path / "a.log.2").read_text().startswith("016")


def test_log_file_on_a_refusing_disk_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(Path("/dev/full"))
    log.write("a\n")
    log.write("b\n")
    assert capsys.readouterr().err == "cannot write /dev/full: No space left on device; logging to stderr only\n"


def test_log_file_goes_on_after_its_folder_came_back(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "a.log")
    log.write("lost\n")
    (tmp_path / "logs").mkdir()
    log.write("kept\n")
    assert (tmp_path / "logs" / "a.log").read_text() == "kept\n"
