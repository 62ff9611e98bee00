"""`Watchdog`: a service that makes no progress dumps its stacks, says what it waits for, and ends with exit code 75."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from loguru import logger

from runtime.doctor.diagnosis import diagnose
from runtime.doctor.evidence import gather_evidence
from runtime.errors import ExitCode
from runtime.health.health import Health, HealthReport
from runtime.process.event_loop import LoopLag
from runtime.run_dir.run_dir import RunDir
from runtime.run_dir.service_lock import record_end

BLOCKED_DUMP_S = 30.0
"""Seconds that an event loop may be blocked before all stacks are dumped, once per block."""
CHAIN_TIMEOUT_S = 5.0
"""Seconds that asking the other services may take: the disk that the answers come from may be what hangs."""
TELL_TIMEOUT_S = 15.0
"""Seconds that telling may take: stderr may be a pipe that no process reads, and that may be what hangs."""


class Watchdog:
    """Watches `health` from a thread. On a stall: dump all stacks, say who waits for whom in `run_dir`, exit 75.

    `os._exit` and not an exception: whatever hangs may hold locks that a clean end would wait for. State that matters
    is on the disk already. With `loop_lag` a blocked event loop is dumped, too.
    """

    def __init__(
        self,
        health: Health,
        stacks: Path | None = None,
        loop_lag: LoopLag | None = None,
        *,
        run_dir: RunDir | None = None,
    ) -> None:
        self._health = health
        self._stacks = stacks
        self._loop_lag = loop_lag
        self._run_dir = run_dir
        self._block_dumped = False
        self._stop = threading.Event()
        self._poll_s = min(1.0, health.stall_timeout_s / 10)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def __enter__(self) -> "Watchdog":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            age = self._health.progress_age_s
            if age > self._health.stall_timeout_s:
                self._end(age)
            if self._loop_lag is not None:
                self._check_loop(self._loop_lag)

    def _check_loop(self, loop_lag: LoopLag) -> None:
        blocked_s = loop_lag.blocked_s
        if blocked_s < BLOCKED_DUMP_S:
            self._block_dumped = False
        elif not self._block_dumped:
            self._block_dumped = True
            _within(TELL_TIMEOUT_S, lambda: self._tell_of_block(blocked_s))

    def _tell_of_block(self, blocked_s: float) -> None:
        stacks = _all_stacks()
        where = self._keep(stacks)
        _print(stacks)
        logger.error(f"event loop blocked for {blocked_s:.0f} s; stacks: {where}")

    def _end(self, age: float) -> None:
        try:
            _within(TELL_TIMEOUT_S, lambda: self._tell_of_stall(age))
        finally:
            os._exit(ExitCode.STALLED)

    def _tell_of_stall(self, age: float) -> None:
        """Files first: they seldom hang, and `rl doctor` reads them."""
        stacks = _all_stacks()
        where = self._keep(stacks)
        waits = self._health.waits or "nothing it knows of"
        reason = (
            f"stalled: no progress for {age:.1f} s "
            f"(stall_timeout_s = {self._health.stall_timeout_s:g}), waiting for {waits}"
        )
        chain = ""
        if self._run_dir is not None:
            name = self._stacks.stem if self._stacks is not None else self._health.service
            chain = _chain(self._run_dir, {name: self._health.report()})
            record_end(self._run_dir.services / f"{name}.lock", f"exit {ExitCode.STALLED:d}: {reason}")
        _print(stacks)
        logger.critical(f"{self._health.service} {reason}; stacks: {where}")
        if chain:
            logger.critical(f"who waits for whom: {chain}")

    def _keep(self, stacks: str) -> str:
        """Write to the stacks file, if possible; say where to look."""
        if self._stacks is None:
            return "stderr"
        try:
            with self._stacks.open("a") as file:
                file.write(stacks)
        except OSError:  # the disk may be what hangs us: stderr has the stacks
            return "stderr"
        return str(self._stacks)


def _all_stacks() -> str:
    """The stacks of all threads. By way of memory: faulthandler holds the interpreter's lock while it writes, so a pipe
    that is not read would freeze every thread, the watchdog's included."""
    try:
        with os.fdopen(os.memfd_create("stacks"), "w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # no descriptor is left, say
        return f"no stacks: {error}\n"


def _print(text: str) -> None:
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do `work` in a thread, and wait for it no longer than that: it may hang where the service hangs."""
    thread = threading.Thread(target=work, name="watchdog tells", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had: better to risk it than to say nothing
        return work()
    thread.join(timeout=seconds)


def _chain(run_dir: RunDir, own: Mapping[str, HealthReport]) -> str:
    """The conclusion of `rl doctor`, if it comes in time."""
    found: list[str] = []

    def ask() -> None:
        found.append(diagnose(gather_evidence(run_dir, known=own)).conclusion)

    _within(CHAIN_TIMEOUT_S, ask)
    return found[0] if found else f"the run directory {run_dir.path} did not tell within {CHAIN_TIMEOUT_S:g} s"
