"""The real trainer process against a real orchestrator process with keys: the right ones train, others are told why."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import run as rl
from runtime.exit_codes import ExitCode
from tests.faults.security.guarded_run import SERVICE
from tests.orchestrator.core.processes import process, write_config
from tests.orchestrator.core.toys import free_endpoint, make_config
from tests.trainer.shell.conftest import model_path  # noqa: F401  the tiny model of the trainer's own tests
from tests.trainer.shell.runs import COMMON, environment
from transport.security import make_keys

pytestmark = pytest.mark.integration
NUM_STEPS = 2
PATIENCE_S = 180.0


def trainer_command(model: Path, folder: Path, endpoint: str, *flags: str) -> list[str]:
    run = ("--run.name", "toy", "--run.dir", str(folder / "trainer"), "--orchestrator.endpoint", endpoint)
    return [sys.executable, "-m", "trainer", "--model.path", str(model), *run, *COMMON, *flags]


def test_made_keys_let_a_trainer_train_and_an_intruder_is_told_its_key_file(
    tmp_path: Path,
    model_path: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys, intruder = tmp_path / "keys", tmp_path / "intruder"
    assert rl(["keys", str(keys)]) == 0
    make_keys(intruder)
    (intruder / "server.public").write_bytes((keys / "server.public").read_bytes())
    server = {"endpoint": free_endpoint(), "keys_dir": str(keys)}
    config = make_config(tmp_path, max_steps=NUM_STEPS, server=server)
    with process(["-m", SERVICE, "@", str(write_config(config, tmp_path))], tmp_path / "out") as orchestrator:
        refused = subprocess.run(
            trainer_command(model_path, tmp_path, server["endpoint"], "--orchestrator.keys-dir", str(intruder)),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert refused.returncode == ExitCode.USAGE, refused.stderr
        assert f"refused our key {intruder / 'client.public'}" in refused.stderr.splitlines()[-1]
        trained = subprocess.run(
            trainer_command(model_path, tmp_path, server["endpoint"], "--orchestrator.keys-dir", str(keys)),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert trained.returncode == ExitCode.OK, trained.stderr
        assert orchestrator.wait(60) == ExitCode.OK, (tmp_path / "out").read_text()
    log = (tmp_path / "toy" / "logs" / "orchestrator.log").read_text()
    assert log.count("rejected key from 127.0.0.1") == 1
    assert log.count("rejected") == 1
    assert "trainer rank 0 at 127.0.0.1 of 1 is here" in log
