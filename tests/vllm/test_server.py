"""What only vLLM has: pause modes, an engine in a process of its own, a supervisor. The contract has its own suite."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import psutil
import pytest

from inference.torch_engine.weights import model_digest
from tests.inference.contract_server import Server, make_model, running_server, save_model
from tests.inference.test_engine_contract import apply, assert_exact, body, generate, order, served, until_health
from tests.support.models import publish
from tests.support.waiting import until
from transport.generation import PAUSE_PATH, RESUME_PATH, WEIGHTS_PATH

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


async def update_in_flight(server: Server, tmp_path: Path) -> "tuple[list[str], list[int]]":
    """Apply version 1 while eight long requests run; how they ended, and the versions that sampled them."""
    models = {0: make_model(0), 1: make_model(1)}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as http:
        manifest = publish(tmp_path, models[1], 1)
        await order(http, server, PAUSE_PATH)  # they begin together, and not before the update is at hand
        tasks = [asyncio.create_task(generate(http, body([5 + i], 250, seed=i))) for i in range(8)]
        await until_health(http, "waiting", 8)
        await order(http, server, RESUME_PATH)
        assert (await apply(http, server, manifest, 1))[0] == 200
        replies = await asyncio.wait_for(asyncio.gather(*tasks), 120)
        for i, reply in enumerate(replies):
            if reply.token_ids.shape[0]:
                assert_exact(models, [5 + i], reply)
        assert_exact(models, [5, 6], await generate(http, body([5, 6], 32)))
        assert (await served(http, server))["digest"] == model_digest(models[1])
    return [reply.finish_reason for reply in replies], [span.version for reply in replies for span in reply.versions]


async def test_wait_lets_requests_end_under_the_old_weights(tmp_path: Path, model_dir: Path) -> None:
    with running_server(tmp_path, model_dir, "--vllm.pause-mode", "wait", engine="vllm") as server:
        await asyncio.to_thread(lambda: server.url)
        reasons, versions = await update_in_flight(server, tmp_path / "weights")
    assert reasons == ["length"] * 8
    assert set(versions) == {0}


async def test_abort_gives_requests_up_and_killed_engine_comes_back_with_version_0(
    tmp_path: Path, model_dir: Path
) -> None:
    with running_server(tmp_path, model_dir, "--vllm.pause-mode", "abort", engine="vllm") as server:
        await asyncio.to_thread(lambda: server.url)
        reasons, versions = await update_in_flight(server, tmp_path / "weights")
        assert "abort" in reasons
        assert set(versions) <= {0}
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
