"""Finds every process that one launch started, however deep, and whatever session or parent it has by now.

A launch puts a random cookie into the environment of its children, which theirs inherit. torchrun gives each rank a
session of its own, and a killed parent leaves its children to init: neither process groups nor parent ids find those.
"""

import os
import signal
import time
from pathlib import Path

VARIABLE = "TANDEM_LAUNCH"
POLL_S = 0.05
KILL_S = 10.0
"""Seconds after which a process that survives SIGKILL (stuck in the kernel) is given up."""


def marked_processes(cookie: str) -> list[int]:
    """Ids of the live processes that carry `cookie`, this one excepted. Empty where there is no `/proc`."""
    marker = f"{VARIABLE}={cookie}".encode()
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
