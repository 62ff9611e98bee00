"""`Campaign`: a reference run without a kill, then runs with kills, each of which must end like the reference."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.exactly_once.evidence import Account, Result, RetirementWatch, check_finished, result_of
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.kills import Budget, Ended, run_to_the_end
from tests.faults.exactly_once.nursery import ROOT, Nursery, environment
from tests.faults.exactly_once.signs import SIGNS

TIMEOUT_S = 600.0
"""Seconds that one run may take, however often it is killed."""


@dataclass
class Campaign:
    """All runs have the seeds of `run`. `hits` says where kills have hit, by service."""

    run: FixedRun
    nurseries: Mapping[str, Nursery]
    rng: random.Random
    cold_share: float = 0.0
    hits: dict[str, Counter[str]] = field(default_factory=lambda: {service: Counter() for service in SIGNS})
    accounts: list[Account] = field(default_factory=list)
    """Of the runs with kills."""

    def reference(self) -> Result:
        """The result of a run without a kill."""
        return self._finish(self.run.named("reference"), Budget(dict.fromkeys(SIGNS, 0), self.rng))[0]

    def with_kills(
        self, kills: Mapping[str, int], *, end_kills: Mapping[str, int] | None = None
    ) -> tuple[Result, Ended]:
        """The result of one run with so many kills of each service (fewer, if it ends before)."""
        budget = Budget(dict(kills), self.rng, cold_share=self.cold_share)
        budget.end_kills.update(end_kills or {})
        run = self.run.named(f"killed-{len(self.accounts) + 1}")
        result, ended, account = self._finish(run, budget)
        self.accounts.append(account)
        for service, counter in budget.hits.items():
            self.hits[service] += counter
        return result, ended

    @property
    def num_runs(self) -> int:
        """Runs with kills that came to their end."""
        return len(self.accounts)

    def num_killed(self, service: str) -> int:
        """Kills of `service` so far."""
        return self.hits[service].total()

    def _finish(self, run: FixedRun, budget: Budget) -> tuple[Result, Ended, Account]:
        watch = RetirementWatch(run.path)
        ended = run_to_the_end(run, dict(self.nurseries), budget, TIMEOUT_S, watch.look)
        account = check_finished(run.path, run.max_steps)
        return result_of(run.path, run.max_steps), ended, account


def make_model(folder: Path) -> Path:
    """A tiny model with random weights."""
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=120)
    return folder
