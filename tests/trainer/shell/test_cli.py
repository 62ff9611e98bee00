import json
import re
import socket
import subprocess
import sys

import pytest
import torch

from runtime.errors import UserError
from runtime.run_dir import RunDir
from tests.support.nursery import environment
from tests.trainer.shell.runs import arguments
from trainer.cli import run
from trainer.distributed import choose_device


def trainer(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "trainer", *flags], env=environment(), capture_output=True, text=True, timeout=60
    )


def assert_user_error(result: "subprocess.CompletedProcess[str]", pattern: str) -> None:
    """One line, exit code 2, no traceback."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("trainer: ")]
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert len(lines) == 1, result.stderr
    assert re.search(pattern, lines[0]), lines[0]


def test_help_and_dry_run_do_not_load_torch():
    script = "import sys, trainer.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=60)
    assert "--replay" in trainer("--help").stdout


def test_dry_run_prints_the_resolved_config(model_path, tmp_path):
    result = trainer(*arguments(model_path, tmp_path, "dry", "--dry-run"))
    assert result.returncode == 0, result.stderr
    resolved = json.loads(result.stdout)
    assert resolved["run"]["name"] == "dry"
    assert resolved["checkpoint"]["interval_steps"] == 10
    assert not (tmp_path / "dry").exists()


def test_a_missing_model_path_is_one_line(tmp_path):
    assert_user_error(trainer(*arguments(tmp_path / "nothing", tmp_path, "run")), "nothing.*no config.json")


def test_an_unknown_key_suggests_the_nearest(model_path, tmp_path):
    result = trainer(*arguments(model_path, tmp_path, "run", "--optimizer.lrr", "1"))
    assert_user_error(result, r"optimizer\.lrr.*optimizer\.lr")


def test_a_missing_replay_folder_is_one_line(model_path, tmp_path):
    result = trainer(*arguments(model_path, tmp_path, "run", "--replay", str(tmp_path / "none")))
    assert_user_error(result, "none is not a folder")


def test_a_decaying_schedule_needs_an_end(model_path, tmp_path):
    result = trainer(*arguments(model_path, tmp_path, "run", "--schedule.type", "linear"))
    assert_user_error(result, "needs max_steps")


def test_export_needs_exactly_one_source(tmp_path):
    assert_user_error(trainer("export", "--out", str(tmp_path / "out")), "either --checkpoint or --run")


@pytest.mark.parametrize("ranks", [{}, {"RANK": "8", "LOCAL_RANK": "0"}], ids=["alone", "first of its machine"])
def test_a_health_port_in_use_is_a_user_error(model_path, recording, tmp_path, monkeypatch, ranks):
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        flags = arguments(model_path, tmp_path, "run", "--replay", str(recording), "--health.port", port)
        with pytest.raises(UserError, match=f"{port}: Address already in use"):
            run(flags)


def test_a_second_trainer_of_the_same_run_is_refused(model_path, recording, tmp_path):
    with RunDir(tmp_path / "run").create().lock("trainer"), pytest.raises(UserError, match="already runs"):
        run(arguments(model_path, tmp_path, "run", "--replay", str(recording)))


def test_a_gpu_that_is_not_there_is_a_user_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        choose_device("cuda")


def test_a_device_that_does_not_exist_is_a_user_error():
    with pytest.raises(UserError, match="abacus"):
        choose_device("abacus")


def test_auto_takes_what_the_machine_has():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
