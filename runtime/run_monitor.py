"""Watches a run from outside: metric files and health endpoints become one `Progress`."""

import time
from collections.abc import Sequence
from dataclasses import replace

from runtime.health_poll import HealthPoll
from runtime.metric_tail import MetricTail, Row
from runtime.progress import Progress, advance
from runtime.run_dir import RunDir


class RunMonitor:
    """`poll` is cheap; the slow part (HTTP) runs in the thread of `health`.

    `step` only counts rows written since the construction: the history of a resumed run is in the curve, but not news.
    """

    def __init__(self, run_dir: RunDir, services: Sequence[str], max_steps: int | None) -> None:
        self.health = HealthPoll(run_dir, services)
        self.progress = Progress(main_service=services[-1], max_steps=max_steps)
        self._tails = {name: MetricTail(run_dir.metrics / f"{name}.jsonl") for name in services}
        self._since = time.time()

    def poll(self) -> list[Progress]:
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

    def _advance(self, name: str, row: Row) -> Progress:
        advanced = advance(self.progress, name, row)
        is_old = (row.get("time") or 0.0) < self._since
        return replace(self.progress, rewards=advanced.rewards) if is_old else advanced
