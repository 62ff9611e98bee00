"""The supervisor of vLLM with real processes and signals; a small server stands in for vLLM's."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inference.config import InferenceConfig
from inference.vllm_engine.supervisor import VllmCondition, VllmServer, VllmSupervisor, reserve
from runtime.errors import ServiceError, UserError
from runtime.health.health import Health, Status
from runtime.process.shutdown import Shutdown
from runtime.run_dir.run_dir import RunDir
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


class Supervised:
    """A supervisor in a thread, as its tests see it."""

    def __init__(self, folder: Path, mode: str, max_restarts: int = 1) -> None:
        self.config = InferenceConfig.model_validate(
            {
                "model": {"path": "models/tiny"},
                "engine": "vllm",
                "server": {"port": 0, "grace_s": 5},
                "vllm": {"start_timeout_s": 60},
            }
        )
        self.run_dir = RunDir(folder / "run").create()
        self.health = Health("inference", stall_timeout_s=60)
        self.shutdown = Shutdown()
        self.error: Exception | None = None
        self._supervisor = VllmSupervisor(
            self.config,
            self.run_dir,
            self.health,
            self.shutdown,
            "http://127.0.0.1:1",
            command=lambda config, port: [
                sys.executable,
                "-m",
                "tests.inference.vllm_engine.fake_vllm",
                mode,
                str(port),
            ],
            max_restarts=max_restarts,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except Exception as error:
            self.error = error

    def end(self, within_s: float = 60) -> Exception | None:
        """Wait for the end of the supervisor; what it raised."""
        self.thread.join(within_s)
        assert not self.thread.is_alive()
        return self.error

    @property
    def announced(self) -> dict[str, str] | None:
        path = self.run_dir.path / "services" / "inference.json"
        return json.loads(path.read_bytes())["addresses"] if path.exists() else None

    def engines(self) -> list[int]:
        """Process ids of all engine processes that the fake servers started."""
        log = self.run_dir.logs / "vllm.out"
        return [int(pid) for pid in re.findall(r"engine (\d+)", log.read_text())] if log.exists() else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervised]]:
    """Starts supervisors; ends what is left of them."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[Supervised] = []

    def start(mode: str, **options: int) -> Supervised:
        started.append(Supervised(tmp_path / str(len(started)), mode, **options))
        return started[-1]

    yield start
    for supervised in started:
        supervised.shutdown.request()
        supervised.thread.join(30)
        supervised.shutdown.close()


def test_key_that_is_not_used_is_named(
    supervise: Callable[..., Supervised], monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "very secret")
    supervise("well")
    assert [line for line in log_lines if "VLLM_API_KEY is not used" in line]
    assert "very secret" not in "".join(log_lines)


def test_server_is_announced_when_it_serves_and_ended_with_its_engine(supervise: Callable[..., Supervised]) -> None:
    vllm = supervise("well")
    until(lambda: vllm.announced, within_s=60)
    assert vllm.announced is not None
    with urllib.request.urlopen(vllm.announced["http"] + "/health", timeout=10) as answer:
        assert json.loads(answer.read())["status"] == "ok"
    until(lambda: vllm.health.report().get("version") == 3, within_s=30)
    assert vllm.health.status is Status.OK
    (engine,) = vllm.engines()
    vllm.shutdown.request()
    assert vllm.end() is None
    assert vllm.announced is None
    until(lambda: not is_running(engine), within_s=30)


@pytest.mark.parametrize("how", ["kill", "engine"])
def test_server_that_dies_is_started_again_at_the_same_address(supervise: Callable[..., Supervised], how: str) -> None:
    vllm = supervise("well")
    until(lambda: vllm.announced, within_s=60)
    assert vllm.announced is not None
    address = vllm.announced["http"]
    (first,) = vllm.engines()
    if how == "kill":
        os.kill(parent_of(first), signal.SIGKILL)
    else:
        poke(address)
    until(lambda: len(vllm.engines()) == 2 and vllm.announced, within_s=60)
    assert vllm.announced is not None
    assert vllm.announced["http"] == address
    until(lambda: not is_running(first), within_s=30)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def poke(address: str) -> None:
    """Make the engine die; the answer is 503."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(address + "/dies", timeout=10)
    caught.value.close()


def test_server_that_dies_too_often_ends_the_service(supervise: Callable[..., Supervised]) -> None:
    vllm = supervise("well", max_restarts=0)
    until(lambda: vllm.announced, within_s=60)
    os.kill(parent_of(vllm.engines()[0]), signal.SIGKILL)
    error = vllm.end()
    assert isinstance(error, ServiceError)
    assert "vLLM died 1 times" in str(error)


def test_wrong_argument_is_the_users_mistake(supervise: Callable[..., Supervised]) -> None:
    error = supervise("refuses").end()
    assert isinstance(error, UserError)
    assert "unrecognized arguments: --nonsense" in str(error)


def test_crash_at_start_is_reported_once_with_its_reason(supervise: Callable[..., Supervised]) -> None:
    error = supervise("crashes").end()
    assert isinstance(error, ServiceError)
    assert not isinstance(error, UserError)
    assert "head size 16 is not supported" in str(error)


def test_vllm_without_our_plugin_is_recognised(supervise: Callable[..., Supervised]) -> None:
    error = supervise("foreign").end()
    assert isinstance(error, UserError)
    assert "without our plugin" in str(error)


def test_stop_while_loading_ends_at_once(supervise: Callable[..., Supervised]) -> None:
    vllm = supervise("well")
    vllm.shutdown.request()
    started = time.monotonic()
    assert vllm.end() is None
    assert time.monotonic() - started < 30


def test_reserved_port_can_be_served_by_another_socket_and_is_not_given_away() -> None:
    with reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            with pytest.raises(UserError, match=f"cannot bind 127.0.0.1:{port}"):
                reserve("127.0.0.1", port)


def test_answer_that_breaks_off_is_none(tmp_path: Path) -> None:
    """A server that dies while it answers is started again: the supervisor must outlive it."""
    with reserve("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        command = [sys.executable, "-m", "tests.inference.vllm_engine.fake_vllm", "breaks off", str(port)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with VllmServer(command, environment, tmp_path / "vllm.out", f"http://127.0.0.1:{port}") as server:

            def broke_off() -> bool:
                assert server.look() is VllmCondition.ABSENT
                return any("broke off" in line for line in server.last_lines())

            until(broke_off, within_s=60)
