"""The real trainer process against a real orchestrator process with keys: the right ones train, others are told why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli import run as rl
from runtime.errors import ExitCode
from tests.faults.security.guarded_run import SERVICE
from tests.orchestrator.toys import free_endpoint, make_config, write_config
from tests.support.process import Process, process
from tests.trainer.conftest import model_path  # noqa: F401  the tiny model of the trainer's own tests
from tests.trainer.runs import COMMON
from transport.security.keys import make_keys

pytestmark = pytest.mark.integration
NUM_STEPS = 2
PATIENCE_S = 180.0


def test_made_keys_let_a_trainer_train_and_an_intruder_is_told_its_key_file(
    tmp_path: Path,
    model_path: Path,  # noqa: F811
    start: Callable[..., Process],
) -> None:
    keys, intruder = tmp_path / "keys", tmp_path / "intruder"
    assert rl(["keys", str(keys)]) == 0
    make_keys(intruder)
    (intruder / "server.public").write_bytes((keys / "server.public").read_bytes())
    server = {"endpoint": free_endpoint(), "keys_dir": str(keys)}
    config = make_config(tmp_path, max_steps=NUM_STEPS, server=server)
    run = ("--run.name", "toy", "--run.dir", str(tmp_path / "trainer"), "--orchestrator.endpoint", server["endpoint"])
    flags = ("--model.path", str(model_path), *run, *COMMON)
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as orchestrator:
        refused = start("trainer", *flags, "--orchestrator.keys-dir", str(intruder), warm=True)
        assert refused.wait(PATIENCE_S) == ExitCode.USAGE, refused.output
        assert f"refused our key {intruder / 'client.public'}" in refused.output.splitlines()[-1]
        start("trainer", *flags, "--orchestrator.keys-dir", str(keys), warm=True).finish(PATIENCE_S)
        orchestrator.finish()
    log = (tmp_path / "toy" / "logs" / "orchestrator.log").read_text()
    assert log.count("rejected key from 127.0.0.1") == 1
    assert log.count("rejected") == 1
    assert "trainer rank 0 at 127.0.0.1 of 1 is here" in log
