"""Watches a run from outside: metric files and health endpoints become one `RunProgress`."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from runtime.health.health import HEALTH_TIMEOUT_S, HealthReport, Status, ask_health
from runtime.metrics.progress import MetricRow, MetricTail, RunProgress, advance
from runtime.run_dir.run_dir import RunDir, ServiceInfo

POLL_S = 0.5


class HealthPoll:
    """Keeps the newest `/health` report of each of `services`, as announced in the run directory."""

    def __init__(self, run_dir: RunDir, services: Iterable[str]) -> None:
        self._run_dir = run_dir
        self._services = tuple(services)
        self._reports: dict[str, HealthReport] = {}
        self._ready: set[str] = set()
        self._others: Mapping[str, ServiceInfo] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="health poll", daemon=True)

    def start(self, others: Mapping[str, ServiceInfo] = MappingProxyType({})) -> None:
        """Begin to ask. `others` were announced before our services were started: they say nothing about ours."""
        self._others = others
        self._thread.start()

    def stop(self) -> None:
        """End the polling; may be called again."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=HEALTH_TIMEOUT_S * len(self._services))

    def is_ready(self, service: str) -> bool:
        """True from the moment on that `service` said that it works, also when it has ended since."""
        return service in self._ready

    def waits(self) -> dict[str, str]:
        """What each service says it waits for; services that wait for nothing are left out."""
        reports = dict(self._reports)
        found = {name: str(report.get("waiting_for") or "") for name, report in reports.items()}
        return {name: what for name, what in sorted(found.items()) if what}

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            announced = self._run_dir.read_services()
            for name in self._services:
                info = announced.get(name)
                url = info.health_url if info is not None and info != self._others.get(name) else ""
                report = ask_health(url)[0] if url else {}
                self._reports[name] = report  # one that ended waits for nothing any more
                if report.get("status") in (Status.OK, Status.STOPPING):
                    self._ready.add(name)


class RunMonitor:
    """`poll` is cheap; the slow part (HTTP) runs in the thread of `health`.

    `step` only counts rows written since the construction: the history of a resumed run is in the curve, but not news.
    """

    def __init__(self, run_dir: RunDir, services: Sequence[str], max_steps: int | None) -> None:
        self.health = HealthPoll(run_dir, services)
        self.progress = RunProgress(main_service=services[-1], max_steps=max_steps)
        self._tails = {name: MetricTail(run_dir.metrics / f"{name}.jsonl") for name in services}
        self._since = time.time()

    def poll(self) -> list[RunProgress]:
        """Take in what is new. Returns the state after each new step, so that none is skipped, and the newest last."""
        states = []
        for name, tail in self._tails.items():
            for row in tail.read():
                step = self.progress.step
                self.progress = self._advance(name, row)
                if self.progress.step != step:
                    states.append(self.progress)
        self.progress = replace(self.progress, waits=self.health.waits())
        return [*states, self.progress]

    def _advance(self, name: str, row: MetricRow) -> RunProgress:
        advanced = advance(self.progress, name, row)
        is_old = (row.get("time") or 0.0) < self._since
        return replace(self.progress, rewards=advanced.rewards) if is_old else advanced
