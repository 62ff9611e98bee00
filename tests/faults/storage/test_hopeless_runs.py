"""Rows 21 and 22: a run that produces no finite number, and a run in which no group differs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import ExitCode
from tests.faults.exactly_once.fixed_run import ORCHESTRATOR, FixedRun
from tests.faults.storage.services import TIMEOUT_S, Services
from tests.faults.storage.small_disk import valid_checkpoints
from tests.support.process import Process
from tests.trainer.runs import arguments, make_batch, weight_bytes
from transport.durable import write_durably
from transport.outbox.outbox import batch_path, file_chunks

pytestmark = pytest.mark.integration
RUN_ID = "hopeless"
OVERFLOW = 3e38
"""An advantage that is finite, and that two of do not add up to a finite loss. A NaN itself cannot come this far: the
engine's reply, the sample and the wire each refuse it (rows 9 and 15)."""
BAD_STEPS = {2, 4, 5, 6}
MAX_IN_A_ROW = 3


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batch 2 is bad alone; batches 4 to 6 are three in a row; 7 would be good again."""
    folder = tmp_path_factory.mktemp("recording")
    for step in range(1, 8):
        batch = make_batch(RUN_ID, step, scale=OVERFLOW if step in BAD_STEPS else 1.0)
        write_durably(batch_path(folder, step), file_chunks(batch))
    return folder


@pytest.fixture
def two_ranks(
    model_path: Path, recording: Path, tmp_path: Path, start_ranks: Callable[..., list[Process]]
) -> list[Process]:
    flags = ("--checkpoint.interval-steps", "1", "--max-non-finite-steps", str(MAX_IN_A_ROW), "--weights.keep", "9")
    command = arguments(model_path, tmp_path, RUN_ID, "--replay", str(recording), *flags)
    return start_ranks(2, *command)


def test_no_rank_steps_on_a_batch_that_is_not_finite_and_three_in_a_row_end_the_run(
    two_ranks: list[Process], recording: Path, tmp_path: Path
) -> None:
    codes = [process.wait(TIMEOUT_S) for process in two_ranks]
    outputs = [process.output for process in two_ranks]
    assert codes == [ExitCode.NON_FINITE] * 2, outputs
    run = tmp_path / RUN_ID
    for rank, output in enumerate(outputs):
        assert "were not finite for 3 steps in a row, up to 6" in output, rank
        assert "Traceback" not in output, rank
    warning = "step 2: loss or gradient is not finite, 1 of 1 optimizer steps skipped (1 in a row, at most 3)"
    assert warning in outputs[0]

    versions = {version: weight_bytes(run, version) for version in range(6)}
    assert versions[1] != versions[0]
    assert versions[2] == versions[1], "no rank has stepped"
    assert versions[3] != versions[2], "and then all went on"
    assert versions[5] == versions[4] == versions[3]
    assert not (run / "weights" / "v00000006").exists()

    kept = sorted(path.name for path in (run / "non_finite").iterdir())
    assert kept == [batch_path(recording, step).name for step in sorted(BAD_STEPS)]
    for name in kept:
        assert (run / "non_finite" / name).read_bytes() == (recording / name).read_bytes()

    assert valid_checkpoints(run)[-1] == 5
    progress = json.loads((run / "checkpoints" / "step-00000005" / "progress.json").read_text())
    assert (progress["step"], progress["num_non_finite"]) == (5, 2)


def test_a_run_in_which_all_rewards_are_equal_ends_with_advice(
    fixed_run: FixedRun, services: Services, tmp_path: Path
) -> None:
    run = fixed_run.below(tmp_path / "runs")
    flags = [*run.orchestrator(), "--max-zero-signal-groups", "30"]
    config = run.folder / "orchestrator.toml"
    config.write_text(ORCHESTRATOR.replace('["aa", "ab", "ba", "bb"]', '["wrong"]'))
    services.start("orchestrator", flags)
    assert services.wait("orchestrator") == ExitCode.NO_SIGNAL
    *_, line = services.output("orchestrator").splitlines()
    assert "the last 30 groups had no signal (newest: env 'copy-text', all rewards 0)" in line
    assert "Raise the temperature or group_size" in line
    assert "Traceback" not in services.output("orchestrator")
    assert not list((run.path / "outbox").glob("*.batch")), "an empty batch is no batch"
    services.start("orchestrator", ["ledger", str(run.path)])
    assert services.wait("orchestrator") == 0, services.output("orchestrator")
