"""Ends every process that one launch started, also when `rl` itself was killed.

A launch puts a random cookie into the environment of its children, which theirs inherit. torchrun gives each rank a
session of its own, and a killed parent leaves its children to init: neither process groups nor parent ids find those.
`python -m runtime.process.guardian COOKIE GRACE_S` waits for the end of its standard input, which comes when `rl` ends
in any way, kill -9 included. Then it ends all processes that carry the cookie. It ignores the signals of the terminal.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

COOKIE_VARIABLE = "TANDEM_LAUNCH"
POLL_S = 0.05
KILL_S = 10.0
"""Seconds after which a process that survives SIGKILL (stuck in the kernel) is given up."""


def marked_processes(cookie: str) -> list[int]:
    """Ids of the live processes that carry `cookie`, this one excepted. Empty where there is no `/proc`."""
    marker = f"{COOKIE_VARIABLE}={cookie}".encode()
    return [pid for pid in _process_ids() if pid != os.getpid() and marker in _environment(pid).split(b"\0")]


def end_marked(cookie: str, grace_s: float) -> int:
    """SIGTERM, then after `grace_s` SIGKILL, to all processes that carry `cookie`. Returns how many there were."""
    found = marked_processes(cookie)
    _signal_all(found, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(cookie)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    deadline = time.monotonic() + KILL_S
    while left and time.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        time.sleep(POLL_S)
        left = marked_processes(cookie)  # again: a process may have forked before it died
    return len(found)


def _process_ids() -> list[int]:
    proc = Path("/proc")
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return b""


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


class Guardian:
    """Runs the guardian process as long as the block lasts; leaving the block sweeps, too."""

    def __init__(self, cookie: str, grace_s: float) -> None:
        self._command = [sys.executable, "-m", "runtime.process.guardian", cookie, str(grace_s)]
        self._grace_s = grace_s

    def __enter__(self) -> "Guardian":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=self._grace_s + 30)


def main(argv: list[str]) -> None:
    """Wait for the end of standard input, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(argv[0], grace_s=float(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
