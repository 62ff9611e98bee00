"""Prometheus metrics of the server. Engine numbers are read at scrape time: the decode loop pays nothing."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.engine import EngineStats
from inference.update_times import phases_of
from transport.generation import ServedWeights, UpdateTimes

_PREFIX = "tandem_inference_"
EngineReader = Callable[[], tuple[EngineStats, ServedWeights] | None]


class ServerMetrics:
    """Own registry, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(f"{_PREFIX}requests", "Answered requests", ["route", "status"], registry=self.registry)
        self.request_seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "Time to answer",
            ["route"],
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300),
            registry=self.registry,
        )
        self.weight_updates = Counter(
            f"{_PREFIX}weight_updates", "Weight updates asked for", ["outcome"], registry=self.registry
        )
        self.weight_update_seconds = Histogram(
            f"{_PREFIX}weight_update_seconds", "Time of weight updates, by phase", ["phase"], registry=self.registry
        )

    def time_update(self, times: UpdateTimes | None) -> None:
        """Count an update that was applied."""
        for phase, seconds in phases_of(times).items():
            self.weight_update_seconds.labels(phase.removesuffix("_s")).observe(seconds)

    def watch(self, read: EngineReader) -> None:
        """Also report what `read` says at each scrape (None: not loaded)."""
        self.registry.register(_EngineCollector(read))


class _EngineCollector(Collector):
    def __init__(self, read: EngineReader) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        if now is None:
            return
        stats, served = now
        yield GaugeMetricFamily(f"{_PREFIX}running", "Sequences in the batch", stats.running)
        yield GaugeMetricFamily(f"{_PREFIX}waiting", "Requests without a slot", stats.waiting)
        yield GaugeMetricFamily(f"{_PREFIX}policy_version", "Policy version in service", served.version)
        yield CounterMetricFamily(f"{_PREFIX}decode_steps", "Decode steps", value=stats.decode_steps)
        yield CounterMetricFamily(f"{_PREFIX}sampled_tokens", "Tokens sampled", value=stats.sampled_tokens)
        yield CounterMetricFamily(f"{_PREFIX}prefilled_tokens", "Tokens prefilled", value=stats.prefilled_tokens)
