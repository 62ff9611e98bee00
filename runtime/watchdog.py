"""No silent hang: a service that makes no progress says where it stands, and ends with exit code 75."""

import faulthandler
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from loguru import logger

from runtime.doctor_diagnosis import diagnose
from runtime.doctor_evidence import Report, gather_evidence
from runtime.exit_codes import ExitCode
from runtime.health import Health
from runtime.loop_lag import LoopLag
from runtime.run_dir import RunDir
from runtime.service_lock import record_end

BLOCKED_DUMP_S = 30.0
"""Seconds that an event loop may be blocked before all stacks are dumped, once per block."""
CHAIN_TIMEOUT_S = 5.0
"""Seconds that asking the other services may take: the disk that the answers come from may be what hangs."""


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
        """Begin to watch."""
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
            logger.error(f"event loop blocked for {blocked_s:.0f} s; stacks: {self._dump()}")

    def _end(self, age: float) -> None:
        where = self._dump()
        waits = self._health.waits or "nothing it knows of"
        reason = (
            f"stalled: no progress for {age:.1f} s "
            f"(stall_timeout_s = {self._health.stall_timeout_s:g}), waiting for {waits}"
        )
        logger.critical(f"{self._health.service} {reason}; stacks: {where}")
        if self._run_dir is not None:
            name = self._stacks.stem if self._stacks is not None else self._health.service
            logger.critical(f"who waits for whom: {_chain(self._run_dir, {name: self._health.report()})}")
            record_end(self._run_dir.services / f"{name}.lock", f"exit {ExitCode.STALLED:d}: {reason}")
        os._exit(ExitCode.STALLED)

    def _dump(self) -> str:
        """Write the stacks of all threads to stderr and, if possible, to the stacks file; say where."""
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self._stacks is None:
            return "stderr"
        try:
            with self._stacks.open("a") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:  # the disk may be what hangs us: stderr has the stacks
            return "stderr"
        return str(self._stacks)


def _chain(run_dir: RunDir, own: Mapping[str, Report]) -> str:
    """The conclusion of `rl doctor`, if it comes in time."""
    found: list[str] = []

    def ask() -> None:
        found.append(diagnose(gather_evidence(run_dir, known=own)).conclusion)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout=CHAIN_TIMEOUT_S)
    return found[0] if found else f"the run directory {run_dir.path} did not tell within {CHAIN_TIMEOUT_S:g} s"
