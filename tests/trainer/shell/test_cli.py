import socket

import pytest
import torch

from runtime.errors import UserError
from tests.trainer.shell.runs import arguments
from trainer.cli import run
from trainer.ranks import choose_device


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
