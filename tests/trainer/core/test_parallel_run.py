"""The whole trainer under torchrun, with ranks that share rows or hold copies, and resumed on another division."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.integration


def trainer(model: Path, runs: Path, num_ranks: int, max_steps: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "trainer", "--model.path", str(model), "--model.seq-len", "64", "--health.port", "0"]
    command += ["--max-steps", str(max_steps), "--data.fake.batch-size", "6", "--data.fake.mean-tokens", "20"]
    command += ["--run.dir", str(runs), "--run.name", "shared", "--optimizer.lr", "1e-3", "--no-metrics.tensorboard"]
    return subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=240)


def weights(runs: Path, version: int) -> dict[str, list[float]]:
    (shard,) = (runs / "shared" / "weights" / f"v{version:08d}").glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(shard).items()}


def test_run_goes_on_with_another_division_of_the_ranks_to_the_same_weights(model_path: Path, tmp_path: Path) -> None:
    first = trainer(
        model_path,
        tmp_path / "a",
        2,
        1,
        "--parallel.cp",
        "2",
        "--checkpoint.background",
        "--token-export.max-sequences-per-step",
        "2",
    )
    assert first.returncode == 0, first.stderr
    files = {path.name for path in (tmp_path / "a" / "shared" / "token_export" / "step-00000001").iterdir()}
    assert files == {"STABLE", "rank-00000.jsonl"}, "only the first rank of a row writes its records"
    second = trainer(model_path, tmp_path / "a", 2, 2, "--parallel.dp-replicate", "2")
    assert second.returncode == 0, second.stderr
    plain = trainer(model_path, tmp_path / "b", 1, 2)
    assert plain.returncode == 0, plain.stderr
    expected = weights(tmp_path / "b", 2)
    for name, values in weights(tmp_path / "a", 2).items():
        assert values == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name
    metrics = [json.loads(line) for line in (tmp_path / "a/shared/metrics/trainer.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]


def test_ranks_that_cannot_be_divided_are_a_clear_error(model_path: Path, tmp_path: Path) -> None:
    done = trainer(model_path, tmp_path, 1, 1, "--parallel.cp", "2")
    assert done.returncode != 0
    assert "start a multiple of 2" in done.stderr
