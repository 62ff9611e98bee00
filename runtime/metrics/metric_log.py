"""Metrics of a service: JSON lines always; TensorBoard, Prometheus and experiment trackers beside them.

Metrics never stop a run: a sink that refuses costs one warning, and is tried again at each step.
"""

import threading
import time
from collections.abc import Callable, Mapping

from loguru import logger
from prometheus_client import CollectorRegistry

from runtime.config.config import MetricsConfig
from runtime.metrics.sinks import JsonlSink, MetricSink, PrometheusSink, TensorBoardSink, trackio_sink, wandb_sink
from runtime.run_dir.run_dir import RunDir


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
