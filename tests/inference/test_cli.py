"""The command line: mistakes are one line and exit code 2, and torch is imported only to serve."""

import subprocess
import sys
from pathlib import Path

import pytest

from inference.cli import check_engine, check_model_path
from inference.config import InferenceConfig
from runtime.errors import UserError


def config(path: Path, **fields: object) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"path": path}} | fields)


def test_missing_model_is_told_apart(tmp_path: Path, model_dir: Path) -> None:
    check_model_path(config(model_dir))
    with pytest.raises(UserError, match="no model at --model"):
        check_model_path(config(tmp_path))


def test_vllm_engine_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tandem-rl\[vllm\]"):
        check_engine(config(tmp_path, engine="vllm"))


def test_command_line_and_server_load_no_torch() -> None:
    code = "import sys, inference.service; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--model.path", "/nonexistent"], "no model at --model.path /nonexistent"),
        (["--model.path", ".", "--engine", "vllm"], "tandem-rl[vllm]"),
        (["--model.path", ".", "--torch.max-batchsize", "3"], "did you mean torch.max_batch_size?"),
        (["--model.path", ".", "--server.port", "99999"], "server.port"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(args: list[str], line: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inference", *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert line in done.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_the_resolved_config(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inference", "--model.path", "m", "--torch.max-waiting", "7", "--dry-run"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0
    assert InferenceConfig.model_validate_json(done.stdout).torch.max_waiting == 7
