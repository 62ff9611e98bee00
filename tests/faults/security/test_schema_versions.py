"""Peers of different releases refuse each other by name, whichever side is the newer one."""

from pathlib import Path

import pytest

from tests.faults.security.future_schema import FUTURE
from tests.faults.security.guarded_run import SERVICE
from tests.orchestrator.toys import make_config, write_config
from tests.support.process import process
from tests.transport.samples import RUN
from transport.client.client import BatchClient
from transport.errors import OutboxError, SchemaMismatch
from transport.outbox.outbox import Outbox
from transport.wire.manifest import SCHEMA_VERSION

pytestmark = pytest.mark.integration


def test_a_trainer_refuses_an_orchestrator_of_a_later_release(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    log = tmp_path / "toy" / "logs" / "orchestrator.log"
    arguments = ["tests.faults.security.future_schema", SERVICE, "@", str(write_config(config, tmp_path))]
    with process(tmp_path / "out", *arguments) as child:
        client = BatchClient(config.server.endpoint, "toy", connect_timeout_s=30)
        with client, pytest.raises(SchemaMismatch, match=f"speaks {SCHEMA_VERSION}, the peer {FUTURE}"):
            client.hello()
        expected = f"rejected schema from 127.0.0.1: schema version {SCHEMA_VERSION}, this server speaks {FUTURE}"
        child.until(lambda: log.read_text().count(expected) == 1)
        assert child.poll() is None


def test_batches_of_a_later_release_are_refused_by_name_and_kept(tmp_path: Path) -> None:
    command = ["tests.faults.security.future_schema", "tests.transport.server.serve"]
    with process(tmp_path / "out", *command, str(tmp_path), "tcp://127.0.0.1:0", "2", "2") as child:
        child.until(lambda: len(list(tmp_path.glob("step-*.batch"))) == 2)
    with pytest.raises(OutboxError, match=f"version {FUTURE}, this tandem-rl has {SCHEMA_VERSION}"):
        Outbox(tmp_path, RUN)
    assert len(list(tmp_path.glob("step-*.batch"))) == 2
