"""Real trainer processes: against a real batch server, and on two ranks that share rows or hold copies.

What happens when a rank dies: tests/faults/liveness.
"""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runtime.errors import ExitCode, PeerLostError, UserError
from tests.support.process import Process
from tests.support.waiting import until
from tests.trainer.conftest import NUM_STEPS
from tests.trainer.runs import RUN_ID, FakeOrchestrator, arguments, torchrun, weight_bytes, weights_of
from trainer.build import check_ranks
from trainer.checkpoints.export import newest_checkpoint
from trainer.cli import run
from trainer.config.trainer import ParallelConfig
from transport.wire.weights import read_weight_manifest

pytestmark = pytest.mark.integration
STARTUP_S = 120.0
"""Importing torch takes its time on a busy machine."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeOrchestrator]:
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID) as running:
        yield running


def flags(server: FakeOrchestrator, model: Path, runs: Path, *more: str) -> list[str]:
    link = ("--orchestrator.endpoint", server.endpoint, "--checkpoint.interval-steps", "2", "--weights.keep", "9")
    return arguments(model, runs, RUN_ID, *link, *more)


def test_a_run_trains_publishes_commits_and_ends(server, straight_run, model_path, tmp_path, start):
    server.publish(1)
    trainer = start("trainer", *flags(server, model_path, tmp_path), warm=True)
    trainer.until(lambda: server.progress == (1, 0), STARTUP_S)
    assert server.version == 1
    announced = server.outbox.progress.weights
    assert read_weight_manifest(Path(announced.location)).digest == announced.digest
    server.publish(2, 3)
    until(lambda: server.progress == (3, 2))
    server.publish(4)
    server.end(NUM_STEPS)
    output = trainer.finish()
    assert server.progress == (NUM_STEPS, NUM_STEPS)
    assert f"the run has ended after step {NUM_STEPS}" in output
    assert weight_bytes(tmp_path / RUN_ID, NUM_STEPS) == weight_bytes(straight_run, NUM_STEPS)


def test_kill_9_and_a_restart_end_with_the_same_weights(server, straight_run, model_path, tmp_path, start):
    server.publish(1, 2, 3)
    trainer = start("trainer", *flags(server, model_path, tmp_path), warm=True)
    trainer.until(lambda: server.progress == (3, 2), STARTUP_S)  # step 3 is trained and in no checkpoint
    trainer.kill()

    server.publish(4)
    server.end(NUM_STEPS)
    output = start("trainer", *flags(server, model_path, tmp_path), warm=True).finish(STARTUP_S)
    assert "resuming after step 2" in output
    assert server.progress == (NUM_STEPS, NUM_STEPS)
    assert weight_bytes(tmp_path / RUN_ID, NUM_STEPS) == weight_bytes(straight_run, NUM_STEPS)


def test_sigterm_commits_what_is_trained_and_exits_0(server, model_path, tmp_path, start):
    server.publish(1)
    trainer = start("trainer", *flags(server, model_path, tmp_path), warm=True)
    trainer.until(lambda: server.progress == (1, 0), STARTUP_S)
    trainer.send(signal.SIGTERM)
    output = trainer.finish(within_s=30)
    assert server.progress == (1, 1)
    assert "stopped by a signal after step 1" in output
    assert newest_checkpoint(tmp_path / RUN_ID / "checkpoints").name == "step-00000001"
    assert list((tmp_path / RUN_ID / "services").glob("*.json")) == []


def test_two_ranks_train_like_one_and_one_resumes_what_two_saved(server, straight_run, model_path, tmp_path, start):
    server.publish(1, 2)
    launcher = start(*torchrun(2, "-m", "trainer", *flags(server, model_path, tmp_path)))
    launcher.until(lambda: server.progress == (2, 2), STARTUP_S)
    run_dir = tmp_path / RUN_ID
    assert (run_dir / "weights/v00000000/model-00001-of-00001.safetensors").read_bytes() == (
        model_path / "model.safetensors"
    ).read_bytes()
    launcher.kill()
    manifest = json.loads((run_dir / "checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["world_size"] == 2

    server.publish(3, 4)
    server.end(NUM_STEPS)
    assert "resuming after step 2" in start("trainer", *flags(server, model_path, tmp_path)).finish(STARTUP_S)
    expected = weights_of(straight_run, NUM_STEPS)
    for name, value in weights_of(run_dir, NUM_STEPS).items():
        assert (value - expected[name]).abs().max() < 1e-6, name


def test_an_orchestrator_of_another_run_is_a_user_error(model_path, tmp_path):
    with (
        FakeOrchestrator(tmp_path / "outbox", "other") as server,
        pytest.raises(UserError, match=f"run '{RUN_ID}', this server runs 'other'"),
    ):
        run(flags(server, model_path, tmp_path))


def test_an_orchestrator_that_is_not_there_is_a_lost_peer(model_path, tmp_path):
    with FakeOrchestrator(tmp_path / "outbox", RUN_ID) as server:
        gone = flags(server, model_path, tmp_path, "--orchestrator.connect-timeout-s", "0.5")
    with pytest.raises(PeerLostError, match="no answer from tcp://") as raised:
        run(gone)
    assert raised.value.exit_code == ExitCode.PEER_LOST


def test_a_trainer_that_comes_back_after_the_end_needs_no_orchestrator(model_path, recording, tmp_path):
    last = ("--max-steps", "2")
    assert run(arguments(model_path, tmp_path, RUN_ID, "--replay", str(recording), *last)) == ExitCode.OK
    nobody = ("--orchestrator.endpoint", "tcp://127.0.0.1:9", "--orchestrator.connect-timeout-s", "0.3")
    assert run(arguments(model_path, tmp_path, RUN_ID, *nobody, *last)) == ExitCode.OK
    with pytest.raises(PeerLostError):
        run(arguments(model_path, tmp_path, RUN_ID, *nobody, "--max-steps", "3"))


def flags_of(model: Path, runs: Path, max_steps: int) -> list[str]:
    flags = ["--model.path", str(model), "--model.seq-len", "64", "--health.port", "0", "--no-metrics.tensorboard"]
    flags += ["--max-steps", str(max_steps), "--data.fake.batch-size", "6", "--data.fake.mean-tokens", "20"]
    return [*flags, "--run.dir", str(runs), "--run.name", "shared", "--optimizer.lr", "1e-3"]


def weights(runs: Path, version: int) -> dict[str, list[float]]:
    (shard,) = (runs / "shared" / "weights" / f"v{version:08d}").glob("*.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in load_file(shard).items()}


def test_run_goes_on_with_another_division_of_the_ranks_to_the_same_weights(
    bare_model_path: Path, tmp_path: Path, start_ranks: Callable[..., list[Process]]
) -> None:
    def two_ranks(max_steps: int, *flags: str) -> None:
        for rank in start_ranks(2, *flags_of(bare_model_path, tmp_path / "a", max_steps), *flags):
            rank.finish(within_s=240)

    two_ranks(1, "--parallel.cp", "2", "--checkpoint.background", "--token-export.max-sequences-per-step", "2")
    files = {path.name for path in (tmp_path / "a" / "shared" / "token_export" / "step-00000001").iterdir()}
    assert files == {"STABLE", "rank-00000.jsonl"}, "only the first rank of a row writes its records"
    two_ranks(2, "--parallel.dp-replicate", "2")
    assert run(flags_of(bare_model_path, tmp_path / "b", 2)) == 0
    expected = weights(tmp_path / "b", 2)
    for name, values in weights(tmp_path / "a", 2).items():
        assert values == pytest.approx(expected[name], rel=1e-3, abs=2e-5), name
    metrics = [json.loads(line) for line in (tmp_path / "a/shared/metrics/trainer.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]


def test_ranks_that_cannot_be_divided_are_a_clear_error() -> None:
    with pytest.raises(UserError, match="start a multiple of 4"):
        check_ranks(ParallelConfig(cp=2, dp_replicate=2), world_size=6)
    check_ranks(ParallelConfig(cp=2, dp_replicate=2), world_size=8)
