"""The whole trainer on two ranks, with ranks that share rows or hold copies, and resumed on another division."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runtime.errors import UserError
from tests.support.process import Process
from trainer.build import check_ranks
from trainer.cli import run
from trainer.config.trainer import ParallelConfig

pytestmark = pytest.mark.integration


def flags_of(model: Path, runs: Path, max_steps: int) -> list[str]:
    flags = ["--model.path", str(model), "--model.seq-len", "64", "--health.port", "0", "--no-metrics.tensorboard"]
    flags += ["--max-steps", str(max_steps), "--data.fake.batch-size", "6", "--data.fake.mean-tokens", "20"]
    return [*flags, "--run.dir", str(runs), "--run.name", "shared", "--optimizer.lr", "1e-3"]


def weights(runs: Path, version: int) -> dict[str, list[float]]:
    (shard,) = (runs / "shared" / "weights" / f"v{version:08d}").glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(shard).items()}


def test_run_goes_on_with_another_division_of_the_ranks_to_the_same_weights(
    model_path: Path, tmp_path: Path, start_ranks: Callable[..., list[Process]]
) -> None:
    def two_ranks(max_steps: int, *flags: str) -> None:
        for rank in start_ranks(2, *flags_of(model_path, tmp_path / "a", max_steps), *flags):
            rank.finish(within_s=240)

    two_ranks(1, "--parallel.cp", "2", "--checkpoint.background", "--token-export.max-sequences-per-step", "2")
    files = {path.name for path in (tmp_path / "a" / "shared" / "token_export" / "step-00000001").iterdir()}
    assert files == {"STABLE", "rank-00000.jsonl"}, "only the first rank of a row writes its records"
    two_ranks(2, "--parallel.dp-replicate", "2")
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
