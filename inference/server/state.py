"""`ServerState`: what the routes share, with the Prometheus metrics of the server."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web
from loguru import logger
from prometheus_client import CollectorRegistry, Counter, Histogram

from inference.api.chat_request import ChatTokenizer
from inference.api.handlers import Handlers
from inference.api.requests import MAX_BODY_BYTES
from inference.errors import Unavailable, UnknownModel
from runtime.health.health import Fact, Health
from runtime.metrics.metric_log import MetricLog

if TYPE_CHECKING:
    from inference.torch_engine.engine import TorchEngine

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


@dataclass(slots=True)
class ServerState:
    """`loaded` is None while the model loads."""

    model_names: tuple[str, ...]
    """Names a client may use; the first one is shown."""
    admin_token: str | None
    request_timeout_s: float
    health: Health
    metrics: ServerMetrics
    max_body_bytes: int = MAX_BODY_BYTES
    """Larger requests are answered with 413."""
    metric_log: MetricLog | None = None
    loaded: "tuple[TorchEngine, ChatTokenizer] | None" = None
    handlers: Handlers = field(init=False)

    def __post_init__(self) -> None:
        self.handlers = Handlers(
            lambda: self.engine,
            request_timeout_s=self.request_timeout_s,
            log=logger,
            count_update=lambda outcome: self.metrics.weight_updates.labels(outcome).inc(),
        )

    @property
    def engine(self) -> "TorchEngine":
        """The engine. Raises `Unavailable` while the model loads."""
        if self.loaded is None:
            raise Unavailable("the model is still loading")
        return self.loaded[0]

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises `Unavailable` while the model loads."""
        if self.loaded is None:
            raise Unavailable("the model is still loading")
        return self.loaded[1]

    def note_progress(self) -> None:
        """The engine calls it, in its own thread, whenever it moves: the health endpoint shows what it does."""
        facts: dict[str, Fact] = {}
        if self.loaded is not None:
            stats = self.engine.stats
            facts = {"version": self.engine.served.version, "running": stats.running, "waiting": stats.waiting}
            facts["sampled_tokens"] = stats.sampled_tokens
        self.health.progress(**facts)

    def check_model(self, name: str | None) -> None:
        """Raise `UnknownModel` if a client names a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise UnknownModel(f"model {name!r} is not served here; this server has {self.model_names[0]!r}")


STATE = web.AppKey("state", ServerState)
