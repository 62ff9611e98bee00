"""A real trainer process against a real batch server. What happens when a rank dies: tests/faults/liveness."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import ExitCode, PeerLostError, UserError
from tests.support.waiting import until
from tests.trainer.shell.conftest import NUM_STEPS
from tests.trainer.shell.recorded import RUN_ID
from tests.trainer.shell.runs import arguments, torchrun, weight_bytes, weights_of
from tests.trainer.shell.stand_in import StandIn
from trainer.checkpoints.export import newest_checkpoint
from trainer.cli import run
from transport.wire.weights import read_weight_manifest

pytestmark = pytest.mark.integration
STARTUP_S = 120.0
"""Importing torch takes its time on a busy machine."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path / "outbox", RUN_ID) as running:
        yield running


def flags(server: StandIn, model: Path, runs: Path, *more: str) -> list[str]:
    link = ("--orchestrator.endpoint", server.endpoint, "--checkpoint.interval-steps", "2", "--weights.keep", "9")
    return arguments(model, runs, RUN_ID, *link, *more)


def test_a_run_trains_publishes_commits_and_ends(server, straight_run, model_path, tmp_path, start):
    server.publish(1)
    trainer = start("trainer", *flags(server, model_path, tmp_path), warm=True)
    trainer.until(lambda: server.progress == (1, 0), STARTUP_S)
    assert server.version == 1
    announced = server.outbox.progress.weights
    assert read_weight_manifest(Path(announced.manifest_path)).digest == announced.digest
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
        StandIn(tmp_path / "outbox", "other") as server,
        pytest.raises(UserError, match=f"run '{RUN_ID}', this server runs 'other'"),
    ):
        run(flags(server, model_path, tmp_path))


def test_an_orchestrator_that_is_not_there_is_a_lost_peer(model_path, tmp_path):
    with StandIn(tmp_path / "outbox", RUN_ID) as server:
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
