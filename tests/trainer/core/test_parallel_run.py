"""The whole trainer under torchrun, with ranks that share rows or hold copies, and resumed on another division."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runtime.errors import UserError
from trainer.cli import run
from trainer.config import ParallelConfig
from trainer.service import check_ranks

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.integration


def flags_of(model: Path, runs: Path, max_steps: int) -> list[str]:
    flags = ["--model.path", str(model), "--model.seq-len", "64", "--health.port", "0", "--no-metrics.tensorboard"]
    flags += ["--max-steps", str(max_steps), "--data.fake.batch-size", "6", "--data.fake.mean-tokens", "20"]
    return [*flags, "--run.dir", str(runs), "--run.name", "shared", "--optimizer.lr", "1e-3"]


def two_ranks(model: Path, runs: Path, max_steps: int, *flags: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer"]
    command += [*flags_of(model, runs, max_steps), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def weights(runs: Path, version: int) -> dict[str, list[float]]:
    (shard,) = (runs / "shared" / "weights" / f"v{version:08d}").glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(shard).items()}


def test_run_goes_on_with_another_division_of_the_ranks_to_the_same_weights(model_path: Path, tmp_path: Path) -> None:
    records = ("--token-export.max-sequences-per-step", "2")
    two_ranks(model_path, tmp_path / "a", 1, "--parallel.cp", "2", "--checkpoint.background", *records)
    files = {path.name for path in (tmp_path / "a" / "shared" / "token_export" / "step-00000001").iterdir()}
    assert files == {"STABLE", "rank-00000.jsonl"}, "only the first rank of a row writes its records"
    two_ranks(model_path, tmp_path / "a", 2, "--parallel.dp-replicate", "2")
    assert run(flags_of(model_path, tmp_path / "b", 2)) == 0
    expected = weights(tmp_path / "b", 2)
    for name, values in weights(tmp_path / "a", 2).items():
        assert values == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name
    metrics = [json.loads(line) for line in (tmp_path / "a/shared/metrics/trainer.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]


def test_ranks_that_cannot_be_divided_are_a_clear_error() -> None:
    with pytest.raises(UserError, match="start a multiple of 4"):
        check_ranks(ParallelConfig(cp=2, dp_replicate=2), world_size=6)
    check_ranks(ParallelConfig(cp=2, dp_replicate=2), world_size=8)
