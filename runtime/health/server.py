"""`/health`, `/live`, `/ready` and `/metrics` over HTTP, from a thread of its own.

A thread and not the service's event loop: the endpoint must answer exactly when the loop, or the training step, hangs.
"""

import contextlib
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from loguru import logger
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.errors import UserError
from runtime.health.health import Health, Status
from transport.security.exposure import family_of, is_local, netloc, reachable

Request = socket.socket | tuple[bytes, socket.socket]

_SERVING = (Status.OK, Status.STOPPING)
_PROBES: Mapping[str, Callable[[Health], bool]] = {
    "/live": lambda health: health.is_live,
    "/ready": lambda health: health.is_ready,
}
_MAX_OPEN = 64
"""Connections that may be open at the same time."""


class HealthServer:
    """Serves until `close`. Port 0 takes a free port; see `url`. Raises `UserError` when the port is taken."""

    def __init__(self, health: Health, *, host: str, port: int, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(HealthGauges(health))
        try:
            self._server = _Server((host, port), _handler(health, registry))
        except OSError as error:
            raise UserError(
                f"cannot bind health endpoint {netloc(host, port)}: {error.strerror}; set --health.port"
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()
        if not is_local(f"http://{netloc(host, port)}"):
            logger.warning("/health and /metrics on {} can be read from other machines", netloc(host, self.port))

    @property
    def url(self) -> str:
        """Full URL of `/health`. A wildcard address is reached through loopback."""
        return reachable(f"http://{netloc(self.host, self.port)}") + "/health"

    def close(self) -> None:
        """Stop answering and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    """Has at most `_MAX_OPEN` connections: a newer one ends the oldest, so that slow callers cannot shut others out."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Request, None] = {}  # in the order they came
        self._guard = threading.Lock()
        self.address_family = family_of(address[0])
        super().__init__(address, handler)

    def process_request(self, request: Request, client_address: object) -> None:
        """Called for each new connection, in the thread of the server."""
        with self._guard:
            if len(self._open) >= _MAX_OPEN:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _hang_up(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Request) -> None:
        """Called when a connection ends, in its own thread."""
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Request, client_address: object) -> None:
        """A caller that hangs up is not news; anything else is a bug of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.opt(exception=error).error("the health endpoint failed")


def _hang_up(request: Request) -> None:
    if isinstance(request, socket.socket):
        with contextlib.suppress(OSError):  # it has hung up itself
            request.shutdown(socket.SHUT_RDWR)


def _handler(health: Health, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # a client that sends nothing must not hold its thread

        def do_GET(self) -> None:
            if self.path == "/health":
                report = health.report()
                code = 200 if report["status"] in _SERVING else 503
                self._reply(code, "application/json", json.dumps(report).encode())
            elif self.path in _PROBES:
                code = 200 if _PROBES[self.path](health) else 503
                self._reply(code, "application/json", json.dumps({"status": health.status.value}).encode())
            elif self.path == "/metrics":
                self._reply(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            else:
                self._reply(404, "application/json", b'{"error": {"message": "try /health, /live, /ready, /metrics"}}')

        def _reply(self, code: int, content_type: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every second: they are not news."""

    return Handler


class HealthGauges(Collector):
    """`tandem_<service>_progress_age_s`, and `tandem_<service>_now_<fact>` for each number among the facts.

    `now` keeps them apart from metrics of the same name, which speak of the newest step.
    """

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges. Facts come and go, so they are not described in advance."""
        prefix = f"tandem_{self._health.service}_"
        for fact, value in self._health.report().items():
            if isinstance(value, int | float):
                name = fact if fact == "progress_age_s" else f"now_{re.sub(r'[^A-Za-z0-9_]', '_', fact)}"
                yield GaugeMetricFamily(prefix + name, f"{fact}, now", float(value))

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: the registry would otherwise collect once at registration."""
        return iter(())
