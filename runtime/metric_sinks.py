"""Places that metrics go to. Each may fail on its own; `runtime.metrics.MetricLog` decides what then."""

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge


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
        """Append one line."""
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
        """Close the event file."""
        self._file.close()


class PrometheusSink:
    """One gauge per key, `tandem_<service>_<key>`, with `_` for what Prometheus does not allow in names."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._prefix = f"tandem_{service}_"
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Set the gauges."""
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
