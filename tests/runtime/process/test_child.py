"""One started process: its output, its end, and what it leaves behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.process.child import KILL_TIMEOUT_S, MAX_LINE_BYTES, TAIL_LINES, Child
from runtime.process.guardian import COOKIE_VARIABLE, Guardian, marked_processes
from tests.support.waiting import until

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPS!r}])
print(child.pid, flush=True)
child.wait()
"""

Start = Callable[[str], Child]


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def start(tmp_path: Path, lines: list[tuple[str, str]]) -> Start:
    def run(program: str) -> Child:
        command = [sys.executable, "-c", program]
        return Child(
            "svc",
            command,
            environment=os.environ,
            log=tmp_path / "svc.out",
            forward=lambda name, line: lines.append((name, line)),
        )

    return run


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_both_streams_are_forwarded_and_logged(start: Start, lines: list[tuple[str, str]], tmp_path: Path) -> None:
    child = start("import sys; print('out', flush=True); print('err', file=sys.stderr)")
    assert child.wait(30)
    assert child.last_lines() == ["out", "err"]
    assert lines == [("svc", "out"), ("svc", "err")]
    assert (tmp_path / "svc.out").read_text() == "out\nerr\n"
    assert child.exit_code == 0


def test_only_the_last_lines_are_kept(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start("for number in range(100): print(number)")
    assert child.wait(30)
    assert child.last_lines() == [str(number) for number in range(100 - TAIL_LINES, 100)]
    assert len(lines) == 100


def test_endless_line_is_cut_into_pieces(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(f"print('x' * {3 * MAX_LINE_BYTES})")
    assert child.wait(30)
    child.last_lines()
    assert len(lines) == 4
    assert max(len(line) for _, line in lines) == MAX_LINE_BYTES


def test_bytes_that_are_no_text_do_no_harm(start: Start) -> None:
    child = start("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb\\r\\n')")
    assert child.wait(30)
    assert child.last_lines() == ["a\ufffd\ufffdb"]


def test_standard_input_is_empty(start: Start) -> None:
    child = start("import sys; print(repr(sys.stdin.read()))")
    assert child.wait(30)
    assert child.last_lines() == ["''"]


def test_exit_code_of_a_signal_is_that_of_a_shell(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(SLEEPS)
    until(lambda: lines)
    assert child.exit_code is None
    child.terminate()
    assert child.wait(10)
    assert child.exit_code == 128 + signal.SIGTERM


def test_wait_says_whether_it_ended(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(DEAF)
    until(lambda: lines)
    child.terminate()
    assert not child.wait(0.2)
    child.kill()
    assert child.exit_code == 128 + signal.SIGKILL
    child.kill()
    child.terminate()


def test_kill_takes_the_whole_group(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(PARENT)
    until(lambda: lines)
    grandchild = int(lines[0][1])
    assert is_alive(grandchild)
    child.kill()
    until(lambda: not is_alive(grandchild), within_s=KILL_TIMEOUT_S)


def test_child_is_not_in_the_group_of_the_terminal(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(SLEEPS)
    until(lambda: lines)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    child.kill()


def test_output_of_a_grandchild_that_outlives_it_does_not_block(start: Start, lines: list[tuple[str, str]]) -> None:
    child = start(f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid)")
    assert child.wait(30)
    tail = child.last_lines()
    os.kill(int(tail[0]), signal.SIGKILL)
    assert child.exit_code == 0


@pytest.mark.parametrize("program", [SLEEPS, DEAF])
def test_guardian_ends_what_carries_the_cookie(program: str) -> None:
    cookie = os.urandom(16).hex()
    with Guardian(cookie, grace_s=0.5):
        marked = subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | {COOKIE_VARIABLE: cookie}, stdout=subprocess.PIPE
        )
        assert marked.stdout is not None
        with marked.stdout as output:
            assert output.readline() == b"up\n"
        assert marked_processes(cookie) == [marked.pid]
    assert marked.wait(5) in (-signal.SIGTERM, -signal.SIGKILL)
    until(lambda: marked_processes(cookie) == [])


def test_guardian_without_anything_to_end_is_quick() -> None:
    with Guardian(os.urandom(16).hex(), grace_s=300):
        pass
