"""The `collective` channel: a process group of two per transfer, in which either side may fail to the other's cost."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from inference.weights.receiver import join_broadcast, own_address
from tests.support.ipv6 import needs_ipv6
from tests.support.waiting import until
from trainer.weights import broadcast
from trainer.weights.broadcast import Broadcaster
from transport.errors import WeightsError
from transport.wire.weights import BroadcastGroup

CPU = torch.device("cpu")
DATA = bytearray(np.random.default_rng(0).bytes(10_000))
DEADLINE_S = 60.0
ROOT = Path(__file__).parents[3]
TRAINER = """
import sys
import msgspec, torch
from trainer.weights import broadcast
broadcast.CHUNK_BYTES = 1000
broadcaster = broadcast.Broadcaster("127.0.0.1", None, torch.device("cpu"), 60.0)
print(msgspec.json.encode(broadcaster.open(memoryview(bytearray(100_000)))).decode(), flush=True)
sys.stdin.read()
"""


def received(group: BroadcastGroup, num_bytes: int = len(DATA), timeout_s: float = DEADLINE_S) -> bytes:
    return b"".join(chunk.tobytes() for chunk in join_broadcast(group, num_bytes, timeout_s, device=CPU))


@needs_ipv6
def test_every_address_means_those_of_ipv4_too() -> None:
    group = Broadcaster("::", "127.0.0.1", CPU, DEADLINE_S).open(memoryview(DATA))
    assert (group.host, received(group)) == ("127.0.0.1", bytes(DATA))


def idle(broadcaster: Broadcaster) -> bool:
    return not any(thread.is_alive() for thread in broadcaster._threads)


def test_bytes_arrive_in_chunks_for_each_engine_in_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 3000)
    broadcaster = Broadcaster("127.0.0.1", None, CPU, DEADLINE_S)
    first, second = broadcaster.open(memoryview(DATA)), broadcaster.open(memoryview(DATA))
    assert (first.host, first.backend, first.port != second.port) == ("127.0.0.1", "gloo", True)
    assert received(second) == received(first) == bytes(DATA)


@needs_ipv6
def test_bytes_arrive_over_ipv6() -> None:
    group = Broadcaster("::1", None, CPU, DEADLINE_S).open(memoryview(DATA))
    assert (group.host, received(group)) == ("::1", bytes(DATA))


def test_engine_that_does_not_come_ends_its_group_and_no_other() -> None:
    broadcaster = Broadcaster("127.0.0.1", None, CPU, timeout_s=1.0)
    broadcaster.open(memoryview(DATA))
    until(lambda: idle(broadcaster), DEADLINE_S)
    patient = Broadcaster("127.0.0.1", None, CPU, DEADLINE_S)
    assert received(patient.open(memoryview(DATA))) == bytes(DATA)


def test_number_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MAX_GROUPS", 1)
    broadcaster = Broadcaster("127.0.0.1", None, CPU, DEADLINE_S)
    group = broadcaster.open(memoryview(DATA))
    with pytest.raises(WeightsError, match="ask again later"):
        broadcaster.open(memoryview(DATA))
    assert received(group) == bytes(DATA)


def test_address_that_is_not_ours_is_the_answer_to_the_engine_that_asked() -> None:
    """Any other exception would end the server of the weights."""
    with pytest.raises(WeightsError, match=r"cannot listen on 203\.0\.113\.7"):
        Broadcaster("203.0.113.7", None, CPU, DEADLINE_S).open(memoryview(DATA))


def test_trainer_that_is_gone_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    group = BroadcastGroup(host="127.0.0.1", port=port, backend="gloo", chunk_bytes=64, timeout_s=1)
    with pytest.raises(WeightsError, match=f"the broadcast from 127.0.0.1:{port} failed"):
        received(group, timeout_s=1)


def test_group_of_gpus_is_refused_by_an_engine_on_a_cpu() -> None:
    broadcaster = Broadcaster("127.0.0.1", None, CPU, timeout_s=1.0)
    group = broadcaster.open(memoryview(DATA))
    other = BroadcastGroup(host=group.host, port=group.port, backend="nccl", chunk_bytes=64, timeout_s=1)
    with pytest.raises(WeightsError, match="runs on a CPU"):
        received(other)


def test_engine_listens_where_the_trainer_can_reach_it() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


def test_engine_that_stops_in_the_middle_ends_its_group_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 1000)
    broadcaster = Broadcaster("127.0.0.1", None, CPU, timeout_s=4.0)
    chunks = iter(join_broadcast(broadcaster.open(memoryview(DATA)), len(DATA), DEADLINE_S, device=CPU))
    assert next(chunks).tobytes() == bytes(DATA[:1000])
    until(lambda: idle(broadcaster), DEADLINE_S)  # the engine is there, and takes no more
    with pytest.raises(WeightsError):
        b"".join(chunk.tobytes() for chunk in chunks)
    patient = Broadcaster("127.0.0.1", None, CPU, DEADLINE_S)
    assert received(patient.open(memoryview(DATA))) == bytes(DATA)


@contextmanager
def trainer() -> Iterator[tuple["subprocess.Popen[str]", BroadcastGroup]]:
    """A process that broadcasts a hundred chunks to one engine."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", TRAINER], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, msgspec.json.decode(process.stdout.readline(), type=BroadcastGroup)
        finally:
            process.kill()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_trainer_that_dies_or_freezes_in_the_middle_is_an_error_in_time(ending: signal.Signals) -> None:
    with trainer() as (process, group):
        chunks = iter(join_broadcast(group, 100_000, 4.0, device=CPU))
        assert next(chunks).nbytes == 1000
        process.send_signal(ending)
        with pytest.raises(WeightsError, match=r"the broadcast from 127\.0\.0\.1"):
            for _ in chunks:
                pass
