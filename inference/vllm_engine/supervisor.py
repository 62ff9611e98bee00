"""The service around vLLM: reserves the port, starts the server, announces it, watches it, starts it again.

```
 reserve port → start vLLM → /health is ok → announce → watch ─┬─ SIGTERM: vLLM drains, exit 0
                    ▲                                          └─ it ended, or its engine died ─┐
                    └──────────── at most `MAX_RESTARTS` times ◀───────────────────────────────┘
```

A server that was started again serves version 0; the orchestrator gives it the current weights before it sends
requests. One that never came up is the user's affair: its last lines are shown, and it is not tried again.
"""

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import msgspec
from loguru import logger

from inference.config import InferenceConfig
from inference.vllm_engine.command import vllm_command, vllm_environment
from runtime.errors import ServiceError, UserError
from runtime.health.health import Health, http_answer
from runtime.process.child import Child
from runtime.process.guardian import COOKIE_VARIABLE, Guardian
from runtime.process.shutdown import Shutdown
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from transport.security.exposure import family_of, netloc, reachable

HEALTH_TIMEOUT_S = 5.0
MAX_RESTARTS = 3
"""Times that a vLLM which died is started again before the service gives up, over its whole life: loading takes
minutes, and one that dies more often has a cause that another start does not remove."""


class VllmCondition(StrEnum):
    """How the server looks from outside."""

    ABSENT = "absent"
    """It does not answer: still loading, or too busy, or hanging."""
    OK = "ok"
    FOREIGN = "foreign"
    """Another server answers on the port, not our plugin."""
    DEAD = "dead"
    """It answers that its engine has died, or that it holds weights it cannot vouch for."""
    ENDED = "ended"
    """The process has ended."""


class VllmHealth(msgspec.Struct, frozen=True):
    """The part of `/health` that the supervisor reads."""

    status: str
    version: int = -1
    running: int = 0
    waiting: int = 0


class VllmServer:
    """Context manager; leaving it ends the process and whatever it started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, url: str) -> None:
        self._child = Child("vllm", command, environment=environment, log=log, forward=lambda name, line: None)
        self._url = url
        self.report: VllmHealth | None = None
        """The last answer to `/health`."""

    @property
    def pid(self) -> int:
        """Process id of vLLM's API server."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """`None` while the process lives."""
        return self._child.exit_code

    def last_lines(self) -> list[str]:
        """The last lines of its output."""
        return self._child.last_lines()

    def look(self) -> VllmCondition:
        """Ask it how it is. Takes at most `HEALTH_TIMEOUT_S`."""
        if self._child.exit_code is not None:
            return VllmCondition.ENDED
        try:
            self.report = msgspec.json.decode(http_answer(f"{self._url}/health", HEALTH_TIMEOUT_S), type=VllmHealth)
        except OSError:  # no connection, no answer in time, or one that broke off
            return VllmCondition.ABSENT
        except (msgspec.MsgspecError, RecursionError):
            return VllmCondition.FOREIGN
        return VllmCondition.OK if self.report.status == "ok" else VllmCondition.DEAD

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`."""
        self._child.terminate()
        self._child.wait(grace_s)

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Its engine processes are in its group; when the API server was killed, they may not have noticed yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(HEALTH_TIMEOUT_S)


SERVICE = "inference"
START_POLL_S = 0.2
WATCH_POLL_S = 1.0
USAGE_CODE = 2
MakeCommand = Callable[[InferenceConfig, int], Sequence[str]]
"""From the config and a port to the command that serves there."""


class VllmSupervisor:
    """Runs vLLM in `run_dir` until `shutdown`; `health` is this service's own, not vLLM's."""

    def __init__(
        self,
        config: InferenceConfig,
        run_dir: RunDir,
        health: Health,
        shutdown: Shutdown,
        health_url: str,
        *,
        command: MakeCommand = vllm_command,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._command = command
        self._max_restarts = max_restarts
        self._config = config
        self._run_dir = run_dir
        self._health = health
        self._shutdown = shutdown
        self._health_url = health_url
        self._environment = vllm_environment(config, os.environ)
        if os.environ.get("VLLM_API_KEY"):
            logger.warning("VLLM_API_KEY is not used: the orchestrator has no such key, and generation needs none")

    def run(self) -> None:
        """Serve to the end. Raises `UserError` if vLLM does not start, `ServiceError` if it died too often."""
        num_restarts = 0
        with self._guardian(), reserve(self._config.server.host, self._config.server.port) as reserved:
            port = reserved.getsockname()[1]
            while not self._live(port):
                num_restarts += 1
                if num_restarts > self._max_restarts:
                    raise ServiceError(f"vLLM died {num_restarts} times; its output is in {self._log}")
                logger.warning(f"vLLM is started again ({num_restarts} of {self._max_restarts})")

    @property
    def _log(self) -> Path:
        return self._run_dir.logs / "vllm.out"

    def _live(self, port: int) -> bool:
        """One life of the server: True if it ended because that was asked for."""
        url = reachable(f"http://{netloc(self._config.server.host, port)}")
        with VllmServer(self._command(self._config, port), self._environment, self._log, url) as server:
            try:
                if self._started(server):
                    self._announce(server, url)
                    self._watch(server)
                if self._shutdown.requested:
                    self._health.stopping()
                    server.stop(self._config.server.grace_s + 5.0)
                    logger.info("stopped")
            finally:
                self._run_dir.withdraw(SERVICE)
        return self._shutdown.requested

    def _started(self, server: VllmServer) -> bool:
        """True when it serves, False when a stop was asked for."""
        timeout_s = self._config.vllm.start_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._health.waiting(f"vLLM to load {self._config.model.path}"):
            while (condition := server.look()) is not VllmCondition.OK:
                if self._shutdown.wait(START_POLL_S):
                    return False
                if condition in (VllmCondition.ENDED, VllmCondition.DEAD):
                    raise self._start_failure(server)
                if condition is VllmCondition.FOREIGN:
                    raise UserError("vLLM runs without our plugin: install tandem-rl in the environment of vLLM")
                if time.monotonic() > deadline:
                    raise ServiceError(f"vLLM did not start within {timeout_s:g} s; its output is in {self._log}")
        return True

    def _start_failure(self, server: VllmServer) -> ServiceError:
        lines = [line for line in server.last_lines() if line.strip()]
        reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), (lines or [""])[-1])
        kind = UserError if server.exit_code == USAGE_CODE else ServiceError
        return kind(f"vLLM did not start: {reason.strip()} (all of its output: {self._log})")

    def _announce(self, server: VllmServer, url: str) -> None:
        addresses = {"http": url, "health": self._health_url}
        self._run_dir.announce(SERVICE, ServiceInfo(health_url=f"{url}/health", addresses=addresses))
        self._health.ready()
        logger.info(f"serving {self._config.model.path} at {url} (vLLM, pid {server.pid})")

    def _watch(self, server: VllmServer) -> None:
        """Return when a stop is asked for, or when this server is lost."""
        while not self._shutdown.wait(WATCH_POLL_S):
            condition = server.look()
            if condition in (VllmCondition.ENDED, VllmCondition.DEAD):
                logger.error(f"vLLM is {condition} (exit code {server.exit_code}); its output is in {self._log}")
                return
            if condition is VllmCondition.OK and server.report is not None:
                report = server.report
                self._health.progress(version=report.version, running=report.running, waiting=report.waiting)

    def _guardian(self) -> AbstractContextManager[object]:
        """Ends vLLM should this process be killed. Below `rl`, its guardian does, by the cookie all of us carry."""
        if COOKIE_VARIABLE in os.environ:
            return nullcontext()
        self._environment[COOKIE_VARIABLE] = secrets.token_hex(16)
        return Guardian(self._environment[COOKIE_VARIABLE], self._config.server.grace_s)


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that never listens: the port stays ours between two lives of vLLM, which binds it, too.

    Raises `UserError` when another process listens there.
    """
    reserved = socket.socket(family_of(host), socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(f"cannot bind {netloc(host, port)}: {reason}; set --server.port") from error
    return reserved
