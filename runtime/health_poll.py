"""Asks the services of a run how they are, from a thread of its own."""

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from runtime.health import Status
from runtime.http_answer import HEALTH_TIMEOUT_S, Report, ask_health
from runtime.run_dir import RunDir
from runtime.service_info import ServiceInfo

POLL_S = 0.5


class HealthPoll:
    """Keeps the newest `/health` report of each of `services`, as announced in the run directory."""

    def __init__(self, run_dir: RunDir, services: Iterable[str]) -> None:
        self._run_dir = run_dir
        self._services = tuple(services)
        self._reports: dict[str, Report] = {}
        self._ready: set[str] = set()
        self._others: Mapping[str, ServiceInfo] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="health poll", daemon=True)

    def start(self, others: Mapping[str, ServiceInfo] = MappingProxyType({})) -> None:
        """Begin to ask. `others` were announced before our services were started: they say nothing about ours."""
        self._others = others
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Idempotent."""
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
