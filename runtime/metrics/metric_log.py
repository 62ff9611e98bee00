"""`MetricLog`: metrics of a service. JSON lines always; TensorBoard, Prometheus and experiment trackers beside them.

Metrics never stop a run: a sink that refuses costs one warning, and is tried again at each step.
"""

import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from loguru import logger
from prometheus_client import CollectorRegistry, Gauge

from runtime.config.config import MetricsConfig, TrackioConfig, WandbConfig
from runtime.run_dir.run_dir import RunDir

WANDB_INIT_TIMEOUT_S = 60.0
"""Seconds that the server may take to answer at start-up; then the run goes on without this sink. Start-up waits for
it, and `rl` waits 300 s for its services."""


class MetricSink(Protocol):
    """One place. `write` raises `OSError` when the place refuses."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Take the values of one step; `at` is wall-clock time in seconds."""
        ...

    def close(self) -> None:
        """Release files. Idempotent."""
        ...


class JsonlSink:
    """One JSON object per step: `{"step", "time", <key>: number or null}`. A torn last line is closed first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._needs_newline = _is_torn(path)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps({"step": step, "time": at, **finite})
        text = "\n" + line + "\n" if self._needs_newline else line + "\n"
        self._needs_newline = True  # unless all of it is written: a full disk may take a part
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._needs_newline = False

    def close(self) -> None:
        """Nothing is kept open."""


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class TensorBoardSink:
    """Event files for TensorBoard, written with its own package: torch is not imported.

    Raises `ImportError` without the `torch` extra.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Append one event with all finite values."""
        entries = [
            self._summary.Value(tag=key, simple_value=value) for key, value in values.items() if math.isfinite(value)
        ]
        event = self._event(wall_time=at, step=step, summary=self._summary(value=entries))
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class PrometheusSink:
    """One gauge per key, `tandem_<service>_<key>`, with `_` for what Prometheus does not allow in names."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._prefix = f"tandem_{service}_"
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._gauge("step").set(step)
        for key, value in values.items():
            self._gauge(key).set(value)

    def close(self) -> None:
        """Gauges live as long as their registry."""

    def _gauge(self, key: str) -> Gauge:
        name = self._prefix + re.sub(r"[^A-Za-z0-9_]", "_", key)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, f"Metric {key}, newest step", registry=self._registry)
        return self._gauges[name]


class TrackedRun(Protocol):
    """A run of wandb or trackio, as `init` returns it."""

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take the values of one step."""
        ...

    def finish(self) -> None:
        """Send what is left."""
        ...


class TrackerSink:
    """One run in a tracker. Raises `OSError` whenever the tracker raises anything.

    Trackers throw away what is logged for an earlier step than their newest, as the figures of an evaluation are,
    which belong to a version that training has left behind: these are logged at the newest step, and say their own.

    A tracker talks to a service that may be away: whatever it raises becomes `OSError`, which `MetricLog` takes as
    "this place refuses". Every service is a run of its own in the tracker, in the group of the run's name; a service
    that is started again goes on in the same one.
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
            settings=wandb.Settings(console="off", init_timeout=WANDB_INIT_TIMEOUT_S),
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


class MetricLog:
    """Writes the numbers of each step to `metrics/<service>.jsonl`, `metrics/tensorboard/<service>` and `registry`.

    Usage: `metrics.log(step, {"loss": 0.3, "reward/all/mean": 0.7})`. Safe to call from several threads.
    """

    def __init__(
        self, service: str, run_dir: RunDir, config: MetricsConfig, registry: CollectorRegistry | None = None
    ) -> None:
        self._sinks: dict[str, MetricSink] = {}
        self._warned: set[str] = set()
        self._writing = threading.Lock()
        self._sinks["jsonl"] = JsonlSink(run_dir.metrics / f"{service}.jsonl")
        if registry is not None:
            self._sinks["prometheus"] = PrometheusSink(service, registry)
        if config.tensorboard:
            self._add("tensorboard", "torch", lambda: TensorBoardSink(run_dir.metrics / "tensorboard" / service))
        run_name = run_dir.path.name
        if config.wandb is not None:
            wandb = config.wandb
            self._add("wandb", "wandb", lambda: wandb_sink(wandb, service, run_name, run_dir.metrics))
        if config.trackio is not None:
            trackio = config.trackio
            folder = run_dir.metrics / "trackio"
            self._add("trackio", "trackio", lambda: trackio_sink(trackio, service, run_name, folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` of `step`. Non-finite numbers become null. Never raises for a full or missing disk."""
        at = time.time()
        numbers = {key: float(value) for key, value in values.items()}
        with self._writing:
            for name, sink in self._sinks.items():
                try:
                    sink.write(step, at, numbers)
                except OSError as error:
                    self._warn(name, f"{name} metrics cannot be written ({error}); the run goes on without them")

    def close(self) -> None:
        """Close all sinks. Idempotent."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except OSError as error:  # buffered bytes that a full disk refused
                self._warn(name, f"{name} metrics are incomplete ({error})")

    def _add(self, name: str, extra: str, make: Callable[[], MetricSink]) -> None:
        """A sink that cannot be made is done without: one warning."""
        try:
            self._sinks[name] = make()
        except ImportError:
            self._warn(
                name, f"{name} is not installed (extra `{extra}`): its metrics are not written; unset metrics.{name}"
            )
        except OSError as error:
            self._warn(name, f"no {name} metrics: {error}")

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(message)
