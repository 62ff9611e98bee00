"""Sinks for experiment trackers: Weights & Biases and trackio, each an extra of the install.

A tracker talks to a service that may be away: whatever it raises becomes `OSError`, which `MetricLog` takes as "this
place refuses". Every service is a run of its own in the tracker, in the group of the run's name; a service that is
started again goes on in the same one.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from runtime.config import TrackioConfig, WandbConfig


class TrackedRun(Protocol):
    """What both trackers give back from `init`."""

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take the values of one step."""
        ...

    def finish(self) -> None:
        """Send what is left."""
        ...


class TrackerSink:
    """One run in a tracker. Raises `OSError` whenever the tracker raises anything.

    Trackers throw away what is logged for an earlier step than their newest, as the figures of an evaluation are, which
    belong to a version that training has left behind: these are logged at the newest step, and say their own.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name = name
        self._run: TrackedRun | None = run
        self._newest_step = 0

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Log all finite values of one step."""
        if self._run is None:
            return
        numbers = {key: value for key, value in values.items() if math.isfinite(value)}
        if step < self._newest_step:
            numbers["logged_for_step"] = float(step)
        self._newest_step = max(self._newest_step, step)
        with _as_os_error(self._name):
            self._run.log(numbers, step=self._newest_step)

    def close(self) -> None:
        """End the run in the tracker. Idempotent."""
        run, self._run = self._run, None
        if run is not None:
            with _as_os_error(self._name):
                run.finish()


def wandb_sink(config: WandbConfig, service: str, run_name: str, folder: Path) -> TrackerSink:
    """Weights & Biases; files go below `folder`. Raises `ImportError` without the extra `wandb`."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    with _as_os_error("wandb"):
        run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            group=run_name,
            job_type=service,
            name=f"{run_name}-{service}",
            id=f"{run_name}-{service}",
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            settings=wandb.Settings(console="off", init_timeout=config.init_timeout_s),
        )
    return TrackerSink("wandb", run)


def trackio_sink(config: TrackioConfig, service: str, run_name: str, folder: Path) -> TrackerSink:
    """trackio, with its data below `folder` unless it is told otherwise. Raises `ImportError` without the extra."""
    os.environ.setdefault("TRACKIO_DIR", str(folder))  # read when it is imported
    import trackio

    with _as_os_error("trackio"):
        run = trackio.init(
            project=config.project,
            space_id=config.space_id,
            group=run_name,
            name=f"{run_name}-{service}",
            resume="allow",
            embed=False,
        )
    return TrackerSink("trackio", run)


@contextmanager
def _as_os_error(tracker: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a decision: no tracker may end a run, whatever it raises
        raise OSError(f"{tracker}: {error}") from error
