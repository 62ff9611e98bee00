"""Kill -9 the services of a run at planned or random instants and start them again at once, until the run has ended.

A kill comes a random time after the process started or after its first act (a step, a batch), or it is aimed: it waits
for a sign on disk of an instant that lasts milliseconds only. Where a kill has hit is read from the disk afterwards.

`Campaign`: a reference run without a kill, then runs with kills, each of which must end like the reference.
"""

import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.signs import (
    LASTING,
    SIGNS,
    Account,
    Result,
    RetirementWatch,
    Token,
    check_finished,
    result_of,
    run_over,
    token,
)
from tests.support.nursery import ROOT, Child, Nursery, environment

POLL_S = 0.001

WATCH_EVERY = 50
"""Polls between two calls of `on_poll`."""

MAX_EARLY_S = 2.0
"""A process that is to die early dies within so many seconds of its start: mostly while it starts up."""

MAX_WORK_S = 1.5
"""One that is to die at work dies within so many seconds of its first act."""

MAX_LIFE_S = 30.0
"""One that waits for its sign, or for its first act, dies after so many seconds at the latest."""

MAX_END_S = 0.3
"""One that is to die at the end dies within so many seconds of the last commit, unless it has ended by then."""

FIRST_ACT = "first act"

RUN_OVER = "run over"

START_UP = "start-up"

AT_WORK = "at work"


@dataclass(frozen=True)
class Aim:
    """Kill `delay_s` after `sign` shows, or after the start if there is none."""

    delay_s: float
    sign: str | None = None


def random_aim(service: str, rng: random.Random) -> Aim:
    """A random instant: 1 in 4 early, 1 in 4 at work, the others at a sign."""
    kind = rng.random()
    if kind < 0.25:
        return Aim(rng.uniform(0.0, MAX_EARLY_S))
    if kind < 0.5:
        return Aim(rng.uniform(0.0, MAX_WORK_S), FIRST_ACT)
    return Aim(0.0, rng.choice(list(SIGNS[service])))


def random_end(rng: random.Random) -> Aim:
    """A random instant after the last commit."""
    return Aim(rng.uniform(0.0, MAX_END_S), RUN_OVER)


def every_aim(service: str) -> list[Aim]:
    """One kill early, one at work, and one at each sign."""
    return [Aim(0.5), Aim(0.5, FIRST_ACT), *(Aim(0.0, sign) for sign in SIGNS[service])]


Plan = Mapping[str, Sequence[Aim]]
"""By service: when to kill its first process, its second, and so on. Those after the last live on."""

NO_KILLS: Plan = dict.fromkeys(SIGNS, ())


@dataclass
class Deaths:
    """What is left of a plan, and where its kills have hit."""

    left: dict[str, list[Aim]]
    hits: dict[str, Counter[str]] = field(default_factory=lambda: {service: Counter() for service in SIGNS})

    def next(self, service: str) -> Aim | None:
        """When to kill the process that starts now; `None`: not at all."""
        return next(iter(self.left[service]), None)

    def happened(self, service: str, instant: str) -> None:
        """A process was killed."""
        del self.left[service][0]
        self.hits[service][instant] += 1


class Life:
    """A service of the run from start to start."""

    def __init__(self, nursery: Nursery, argv: list[str], run: Path, deaths: Deaths) -> None:
        self.service = nursery.service
        self.num_starts = 0
        self._nursery = nursery
        self._argv = argv
        self._run = run
        self._deaths = deaths
        self._child = self._start()

    def _start(self) -> Child:
        self._aim = self._deaths.next(self.service)
        self._before = {name: self._token(name) for name in (*SIGNS[self.service], FIRST_ACT, RUN_OVER)}
        self._counts_from: float | None = None
        self._started = time.monotonic()
        self.num_starts += 1
        output = self._run.with_name(f"{self._run.name}-{self.service}.log")
        return self._nursery.start(self._argv, output)

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself. Anything but exit code 0 is a failure of the test."""
        code = self._child.poll()
        assert code in (None, 0), f"{self.service} ended with {code}:\n{self.output()[-4000:]}"
        return code == 0

    def output(self) -> str:
        """What it printed, in all its lives."""
        return self._run.with_name(f"{self._run.name}-{self.service}.log").read_text()

    def disturb(self) -> None:
        """Kill it if its instant has come, and start it again."""
        if self._aim is None or not self._is_time(self._aim):
            return
        self._child.kill()
        while (code := self._child.poll()) is None:
            time.sleep(POLL_S)
        if code != -9:  # it ended by itself in the same instant: `has_ended` looks at how
            return
        self._deaths.happened(self.service, self._instant())
        self._child = self._start()

    def _is_time(self, aim: Aim) -> bool:
        now = time.monotonic()
        if self._counts_from is None and (aim.sign is None or self._shows(aim.sign)):
            self._counts_from = self._started if aim.sign is None else now
        if self._counts_from is not None and now - self._counts_from >= aim.delay_s:
            return True
        return aim.sign != RUN_OVER and now - self._started >= MAX_LIFE_S

    def _instant(self) -> str:
        """What the process was doing when it died."""
        shown = [name for name in SIGNS[self.service] if name not in LASTING and self._shows(name)]
        if shown:
            return shown[0]
        if self._token(RUN_OVER):
            return RUN_OVER
        return AT_WORK if self._shows(FIRST_ACT) else START_UP

    def _shows(self, name: str) -> bool:
        now = self._token(name)
        return now is not None and now != self._before[name]

    def _token(self, name: str) -> Token | None:
        if name == FIRST_ACT:
            return token(self._run / "metrics" / f"{self.service}.jsonl")
        if name == RUN_OVER:
            return run_over(self._run)
        return SIGNS[self.service][name](self._run)


@dataclass(frozen=True)
class Ended:
    """A run that came to its end."""

    duration_s: float
    num_starts: dict[str, int]
    hits: dict[str, Counter[str]]
    """Where kills have hit, by service."""


def run_to_the_end(
    run: FixedRun, nurseries: Mapping[str, Nursery], plan: Plan, timeout_s: float, on_poll: Callable[[], None]
) -> Ended:
    """Run both services, killing by `plan`. `AssertionError` if one fails or the time is up."""
    started = time.monotonic()
    deaths = Deaths({service: list(aims) for service, aims in plan.items()})
    arguments = {"orchestrator": run.orchestrator(), "trainer": run.trainer()}
    lives = [Life(nursery, arguments[name], run.path, deaths) for name, nursery in nurseries.items()]
    polls = itertools.count()
    while alive := [life for life in lives if not life.has_ended]:
        for life in alive:
            life.disturb()
        if next(polls) % WATCH_EVERY == 0:
            on_poll()
        assert time.monotonic() - started < timeout_s, "\n".join(life.output()[-2000:] for life in lives)
        time.sleep(POLL_S)
    return Ended(time.monotonic() - started, {life.service: life.num_starts for life in lives}, deaths.hits)


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
