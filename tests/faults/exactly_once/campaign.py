"""`Campaign`: a reference run without a kill, then runs with kills, each of which must end like the reference."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.exactly_once.evidence import Account, Result, RetirementWatch, check_finished, result_of
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.kills import NO_KILLS, Ended, Plan, run_to_the_end
from tests.faults.exactly_once.signs import SIGNS
from tests.support.nursery import ROOT, Nursery, environment

TIMEOUT_S = 600.0
"""Seconds that one run may take, however often it is killed."""
REFERENCE = "reference"
"""Name of the run without a kill."""


@dataclass(frozen=True)
class Reference:
    """A run without a kill that kept all its checkpoints."""

    path: Path

    def after(self, num_steps: int) -> Result:
        """What a run of so many steps must end with. The learning rate is constant: shorter runs are parts of it."""
        return result_of(self.path, num_steps)


@dataclass
class Campaign:
    """All runs have the seeds of `run`. `hits` says where kills have hit, by service."""

    run: FixedRun
    nurseries: Mapping[str, Nursery]
    hits: dict[str, Counter[str]] = field(default_factory=lambda: {service: Counter() for service in SIGNS})
    accounts: list[Account] = field(default_factory=list)
    """Of the runs with kills."""

    def reference(self) -> Reference:
        """A run without a kill."""
        run = replace(self.run, name=REFERENCE, keep=self.run.max_steps)
        self._finish(run, NO_KILLS)
        return Reference(run.path)

    def with_kills(self, plan: Plan) -> tuple[Result, Ended]:
        """The result of one run with the kills of `plan` (fewer, if it ends before)."""
        run = self.run.named(f"killed-{len(self.accounts) + 1}")
        ended, account = self._finish(run, plan)
        self.accounts.append(account)
        for service, counter in ended.hits.items():
            self.hits[service] += counter
        return result_of(run.path, run.max_steps), ended

    @property
    def num_runs(self) -> int:
        """Runs with kills that came to their end."""
        return len(self.accounts)

    def num_killed(self, service: str) -> int:
        """Kills of `service` so far."""
        return self.hits[service].total()

    def _finish(self, run: FixedRun, plan: Plan) -> tuple[Ended, Account]:
        ended = run_to_the_end(run, self.nurseries, plan, TIMEOUT_S, RetirementWatch(run.path).look)
        return ended, check_finished(run.path, run.max_steps)


def make_model(folder: Path) -> Path:
    """A tiny model with random weights."""
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=120)
    return folder
