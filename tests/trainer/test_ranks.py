"""`Ranks`: alone and as two real processes; and which device and health port a rank takes."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.errors import PeerLostError, StorageError, UserError
from tests.trainer.runs import arguments, torchrun
from tests.trainer.tiny import ALONE
from trainer.cli import run
from trainer.ranks import choose_device


def test_a_plain_process_is_a_group_of_its_own():
    assert ALONE.gather(b"mine") == [b"mine"]
    assert ALONE.together(lambda: b"mine") == [b"mine"]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.mesh() is None
    ALONE.require_same("anything", "a value")
    ALONE.barrier()


def test_a_failing_disk_is_a_storage_error_that_names_the_rank():
    def refuse() -> bytes:
        raise OSError("no space left")

    with pytest.raises(StorageError, match="rank 0: no space left"):
        ALONE.together(refuse)


@pytest.mark.integration
def test_two_ranks_exchange_bytes_and_fail_together(tmp_path, start):
    said = tmp_path / "said"
    said.mkdir()
    start(*torchrun(2, str(Path(__file__).with_name("rank_checks.py")), str(said))).finish(within_s=120)
    assert {path.read_text() for path in said.iterdir()} == {"0 of 2, first: True", "1 of 2, first: False"}


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9123"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), dist.DistBackendError("NCCL error"), dist.DistNetworkError("x")])
def test_failed_collective_is_a_lost_peer_wherever_it_was_called(error: RuntimeError):
    with pytest.raises(PeerLostError, match="rank 0 lost another rank: "), ALONE.together_with_peers():
        raise error


def test_other_errors_are_not_blamed_on_peers():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ALONE.together_with_peers():
        raise RuntimeError("shapes cannot be multiplied")


def test_a_health_port_in_use_is_a_user_error_of_the_first_rank_of_a_machine(
    model_path, recording, tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        flags = arguments(model_path, tmp_path, "run", "--replay", str(recording), "--health.port", port)
        with pytest.raises(UserError, match=f"{port}: Address already in use"):
            run(flags)


def test_a_gpu_that_is_not_there_is_a_user_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        choose_device("cuda")


def test_a_device_that_does_not_exist_is_a_user_error():
    with pytest.raises(UserError, match="abacus"):
        choose_device("abacus")


def test_auto_takes_what_the_machine_has():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
