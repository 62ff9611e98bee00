"""Prometheus metrics of the server, served by the health endpoint. Numbers of the engine are facts of `/health`."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_PREFIX = "tandem_inference_"


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
