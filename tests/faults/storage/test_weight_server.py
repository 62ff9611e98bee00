"""Weights over ZeroMQ when a process dies or freezes in the middle of a transfer. Real engine, real trainer process."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.storage.weight_trainer import weights_of
from tests.inference.contract_server import Server, make_model, running_server, save_model
from tests.transport.weights.weight_ranks import WeightRanks
from transport.weights.client import FetchSettings, fetch_weights
from transport.weights.server import WeightStore
from transport.wire.generation import WEIGHTS_PATH
from transport.wire.weights import parse_location

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120.0
FLAGS = ("--weights.chunk-bytes", "1024", "--weights.lost-timeout-s", "3")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", make_model())


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine for all tests; it asks for a kilobyte at a time."""
    with running_server(tmp_path_factory.mktemp("engine"), model_folder, *FLAGS, engine="torch") as server:
        yield server


@contextmanager
def trainer(model: Path, version: int, die_after: int = 0) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A trainer process, and where it serves `version`."""
    command = [sys.executable, "-m", "tests.faults.storage.weight_trainer", str(model), str(version), str(die_after)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def order(engine: Server, location: str, version: int) -> tuple[int, dict[str, object]]:
    body = json.dumps({"manifest_path": location, "version": version}).encode()
    request = urllib.request.Request(engine.url + WEIGHTS_PATH, data=body, headers=engine.admin)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def served(engine: Server) -> dict[str, object]:
    request = urllib.request.Request(engine.url + WEIGHTS_PATH, headers=engine.admin)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        weights: dict[str, object] = json.loads(reply.read())
        return weights


def test_trainer_killed_in_mid_transfer_leaves_the_old_version_and_its_successor_brings_the_new_one(
    engine: Server, model_folder: Path
) -> None:
    before = served(engine)
    with trainer(model_folder, 1, die_after=20) as (process, location):
        status, answer = order(engine, location, 1)
        assert (status, answer["error"]["type"]) == (409, "weights_refused"), answer  # type: ignore[index]
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL, "it died while it was asked for bytes"
    assert served(engine) == before
    with trainer(model_folder, 1) as (_, location):
        status, answer = order(engine, location, 1)
    assert (status, answer["version"]) == (200, 1), answer
    assert served(engine) == {key: answer[key] for key in ("version", "digest")}


class FreezingStore(WeightStore):
    """Freezes a process when it has asked for bytes a few times."""

    def __init__(self, pid: int) -> None:
        super().__init__(keep=2)
        self.frozen = threading.Event()
        self._pid = pid
        self._reads = 0

    def read(self, version: int, offset: int, num_bytes: int) -> memoryview:
        self._reads += 1
        if self._reads == 5:
            os.kill(self._pid, signal.SIGSTOP)
            self.frozen.set()
        return super().read(version, offset, num_bytes)


def test_engine_frozen_in_mid_transfer_holds_up_nobody_and_gets_the_newest_later(
    engine: Server, model_folder: Path
) -> None:
    before = served(engine)
    store = FreezingStore(engine.pid)
    answers: list[tuple[int, dict[str, object]]] = []
    with WeightRanks(1, stores=[store]) as ranks:
        location = ranks.put(weights_of(model_folder, 11), 11)
        asking = threading.Thread(target=lambda: answers.append(order(engine, location, 11)))
        asking.start()
        try:
            assert store.frozen.wait(TIMEOUT_S)
            for version in (12, 13, 14):
                ranks.put(weights_of(model_folder, version), version)
            held = list(store._versions)
            assert held == [13, 14], "memory is bounded by `keep`, whoever is in the middle of a transfer"
            settings = FetchSettings(lost_timeout_s=60, peer_timeout_s=10)
            other = fetch_weights(parse_location(location)[1], "default", 14, settings, threading.Event())
            assert other.manifest.version == 14, "another engine is served meanwhile"
        finally:
            engine.send(signal.SIGCONT)
            asking.join(TIMEOUT_S)
        assert [status for status, _ in answers] == [409], answers
        assert served(engine) == before
        status, answer = order(engine, location, 14)
        assert (status, answer["version"]) == (200, 14), answer
