"""What only vLLM has: an engine in a process of its own, a supervisor. The contract has its own suite."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest

from inference.weights.publish import model_digest
from tests.inference.contract_server import Server, make_model, running_server, save_model
from tests.support.models import publish
from tests.support.waiting import until
from transport.wire.generation import WEIGHTS_PATH, ApplyWeights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 0."""
    return save_model(tmp_path_factory.mktemp("vllm") / "model", make_model(0))


def health_of(server: Server) -> "dict[str, object] | None":
    """What `/health` says; None while nobody answers."""
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=5) as answer:
            report: dict[str, object] = json.loads(answer.read())
            return report
    except (OSError, ValueError):
        return None


def children(server: Server, word: str) -> "list[psutil.Process]":
    """Processes below the server that have `word` in their name or command line."""
    found = psutil.Process(server.pid).children(recursive=True)
    return [child for child in found if word in " ".join([child.name(), *child.cmdline()])]


def test_killed_engine_comes_back_with_version_0(tmp_path: Path, model_dir: Path) -> None:
    manifest = publish(tmp_path / "weights", make_model(1), 1)
    with running_server(tmp_path, model_dir, engine="vllm") as server:
        order = msgspec.json.encode(ApplyWeights(location=str(manifest), version=1))
        request = urllib.request.Request(server.url + WEIGHTS_PATH, data=order, headers=server.admin)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["version"] == 1
        first = children(server, "vllm.entrypoints")[0].pid
        os.kill(children(server, "EngineCore")[0].pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(first), within_s=60)
        until(lambda: (health_of(server) or {}).get("status") == "ok", within_s=240)
        report = health_of(server)
        assert report is not None
        assert (report["version"], report["digest"]) == (0, model_digest(make_model(0)))
        assert len(children(server, "EngineCore")) == 1
        assert server.stop() == 0, server.output
    assert not psutil.pid_exists(first)


def test_admin_routes_are_off_without_a_token_and_dev_routes_do_not_exist(tmp_path: Path, model_dir: Path) -> None:
    with running_server(tmp_path, model_dir, token=False, engine="vllm") as server:
        for path, status in ((WEIGHTS_PATH, 403), ("/collective_rpc", 404), ("/pause", 404), ("/update_weights", 404)):
            request = urllib.request.Request(server.url + path, headers={"Authorization": "Bearer None"})
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=10)
            caught.value.close()
            assert caught.value.code == status, path
        vllm = [child.pid for child in children(server, "vllm")]
        server.stop(signal.SIGKILL, 30)  # the guardian ends what a killed service leaves behind
        until(lambda: not any(psutil.pid_exists(pid) for pid in vllm), within_s=60)


def test_argument_that_vllm_does_not_know_is_one_line_and_exit_code_2(tmp_path: Path, model_dir: Path) -> None:
    command = [sys.executable, "-m", "inference", "--engine", "vllm", "--model.path", str(model_dir)]
    command += ["--server.port", "0", "--vllm.extra-args", '["--no-such-flag"]']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert "Traceback" not in done.stderr
