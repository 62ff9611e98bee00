"""Who may speak to a real orchestrator process: everybody else gets nothing, harms nobody, and is named in one line.

Each stranger comes from a loopback address of its own, so that the lines about it can be told apart.

The real trainer process against a real orchestrator process with keys: the right ones train, others are told why.

Peers of different releases refuse each other by name, whichever side is the newer one.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.cli import run as rl
from runtime.errors import ExitCode
from tests.faults.security.future_schema import FUTURE
from tests.faults.security.guarded_run import DEADLINE_S, SERVICE, GuardedRun, guarded_run, make_keyring
from tests.orchestrator.toys import free_endpoint, make_config, write_config
from tests.support.process import Process, process
from tests.support.waiting import until
from tests.trainer.conftest import model_path  # noqa: F401  the tiny model of the trainer's own tests
from tests.trainer.runs import COMMON
from tests.transport.samples import RUN
from transport.client.client import BatchClient
from transport.errors import OutboxError, SchemaMismatch
from transport.outbox.outbox import Outbox
from transport.security.keys import make_keys
from transport.wire.manifest import SCHEMA_VERSION

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Stranger:
    """Where it comes from, what it brings, what it is told, and what the orchestrator's log says of it."""

    address: str
    arguments: tuple[str, ...]
    told: str
    logged: str

    @property
    def name(self) -> str:
        """What the log calls it: libzmq tells no address of a greeting that failed."""
        return "an unknown address" if "handshake" in self.logged else self.address

    def start(self, run: GuardedRun, folder: Path) -> list[str]:
        arguments = [argument.format(keys=folder) for argument in self.arguments]
        out = str(folder / self.address)
        return ["tests.faults.security.stranger", run.endpoint_from(self.address), out, *arguments]


RIGHT_KEY = ("--keys", "{keys}/keys")

GUARDED = {
    "no key": Stranger("127.0.0.11", (), "keys|broke off", "rejected handshake"),
    "a key that is not on the list": Stranger(
        "127.0.0.12", ("--keys", "{keys}/intruder"), "not on the server's allow-list", "rejected key"
    ),
    "the key of another server": Stranger(
        "127.0.0.13", ("--keys", "{keys}/elsewhere"), "server.public", "rejected handshake"
    ),
    "another run": Stranger("127.0.0.14", (*RIGHT_KEY, "--run", "foreign"), "'foreign'", "rejected run"),
    "another schema": Stranger(
        "127.0.0.15", (*RIGHT_KEY, "--schema", "99"), f"speaks 99, the peer {SCHEMA_VERSION}", "rejected schema"
    ),
    "garbage": Stranger("127.0.0.16", (*RIGHT_KEY, "--garbage"), "nothing", "rejected garbage"),
}

OPEN = {
    "a key where none is used": Stranger("127.0.0.21", RIGHT_KEY, "keys|broke off", "rejected handshake"),
    "another run": Stranger("127.0.0.24", ("--run", "foreign"), "'foreign'", "rejected run"),
    "another schema": Stranger(
        "127.0.0.25", ("--schema", "99"), f"speaks 99, the peer {SCHEMA_VERSION}", "rejected schema"
    ),
    "garbage": Stranger("127.0.0.26", ("--garbage",), "nothing", "rejected garbage"),
}


@dataclass(frozen=True)
class Aftermath:
    """What was left when all strangers had come, been named, come again several times, and gone."""

    log_lines: dict[str, list[str]]
    told: dict[str, list[str]]
    steps_meanwhile: int
    metrics: str
    """What the orchestrator's `/metrics` said."""


def besiege(folder: Path, strangers: dict[str, Stranger], *, guarded: bool) -> Aftermath:
    """Let all strangers at a run at once, until each was named and has tried at least twice more."""
    keys = make_keyring(folder)

    def told(stranger: Stranger) -> list[str]:
        path = folder / stranger.address
        return path.read_text().splitlines() if path.exists() else []

    with guarded_run(folder, keys_dir=keys if guarded else None) as run:
        before = len(run.trainer.batches)
        with ExitStack() as stack:
            for stranger in strangers.values():
                stack.enter_context(process(folder / "strangers.out", *stranger.start(run, folder)))
            for stranger in strangers.values():
                until(lambda one=stranger: bool(run.lines_about(one.name)), DEADLINE_S)
                tries = len(told(stranger))
                until(lambda one=stranger, so_far=tries: len(told(one)) >= so_far + 2, DEADLINE_S)
        meanwhile = len(run.trainer.batches) - before
        metrics = run.orchestrator.metrics_text()
    return Aftermath(
        {kind: run.lines_about(stranger.name) for kind, stranger in strangers.items()},
        {kind: told(stranger) for kind, stranger in strangers.items()},
        meanwhile,
        metrics,
    )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    return besiege(tmp_path_factory.mktemp("guarded"), GUARDED, guarded=True)


@pytest.fixture(scope="module")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Aftermath:
    return besiege(tmp_path_factory.mktemp("open"), OPEN, guarded=False)


def assert_turned_away(aftermath: Aftermath, kind: str, stranger: Stranger) -> None:
    """Told why, given nothing, and named exactly once."""
    assert all(re.search(stranger.told, line) for line in aftermath.told[kind]), aftermath.told[kind]
    assert not any(line.startswith("got") for line in aftermath.told[kind])
    assert len(aftermath.log_lines[kind]) == 1, aftermath.log_lines[kind]
    assert stranger.logged in aftermath.log_lines[kind][0]


@pytest.mark.parametrize("kind", GUARDED)
def test_stranger_at_a_guarded_run_gets_nothing_and_is_named_once(kind: str, guarded: Aftermath) -> None:
    assert_turned_away(guarded, kind, GUARDED[kind])


@pytest.mark.parametrize("kind", OPEN)
def test_stranger_at_an_open_run_gets_nothing_and_is_named_once(kind: str, unguarded: Aftermath) -> None:
    assert_turned_away(unguarded, kind, OPEN[kind])


def test_the_honest_trainer_trained_on_meanwhile(guarded: Aftermath, unguarded: Aftermath) -> None:
    """`guarded_run` has checked that every step was trained, in order; here, that strangers did not stop the clock."""
    assert min(guarded.steps_meanwhile, unguarded.steps_meanwhile) >= 3


def test_a_refused_key_is_named_by_its_file_and_by_its_first_letters(guarded: Aftermath) -> None:
    kind = "a key that is not on the list"
    assert all("intruder/client.public" in line for line in guarded.told[kind])
    assert re.search(r"client key \S{8}\.\.\. is not on the allow-list", guarded.log_lines[kind][0])


def test_both_schema_versions_are_named_on_both_sides(guarded: Aftermath) -> None:
    kind = "another schema"
    assert f"schema version 99, this server speaks {SCHEMA_VERSION}" in guarded.log_lines[kind][0]
    assert all(f"this side speaks 99, the peer {SCHEMA_VERSION}" in line for line in guarded.told[kind])


def test_both_runs_are_named_on_both_sides(guarded: Aftermath) -> None:
    kind = "another run"
    for line in (guarded.log_lines[kind][0], *guarded.told[kind]):
        assert "run 'foreign', this server runs 'toy'" in line


def test_everything_turned_away_is_counted(guarded: Aftermath) -> None:
    for reason in ("handshake", "key", "run", "schema", "garbage"):
        counted = re.search(rf"^tandem_orchestrator_now_rejected_{reason} (\S+)$", guarded.metrics, re.MULTILINE)
        assert counted is not None, guarded.metrics
        assert float(counted[1]) >= 2, reason


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
