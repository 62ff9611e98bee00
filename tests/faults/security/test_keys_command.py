"""`rl keys DIR`: makes what both sides need, says what goes where, overwrites nothing.

Who is reachable from other machines without keys or a token says so again and again, not only at the start.
"""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inference import service
from inference.config import InferenceConfig
from runtime.cli import run
from runtime.errors import ExitCode, UserError
from runtime.launch.rl_config import compose, find_services
from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN
from transport.outbox.outbox import Outbox
from transport.security import exposure
from transport.security.exposure import reminding_of_exposure
from transport.security.keys import CurveKeys
from transport.weights.server import WeightServer, WeightStore

ROOT = Path(__file__).parents[3]


def rl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "runtime", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_keys_fit_both_sides_and_are_for_the_owner(tmp_path: Path) -> None:
    result = rl("keys", str(tmp_path / "keys"))
    assert result.returncode == 0, result.stderr
    server, client = CurveKeys.for_server(tmp_path / "keys"), CurveKeys.for_client(tmp_path / "keys")
    assert client.public in server.peers
    assert client.peers == {server.public}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()}
    assert modes == {"server.secret": 0o600, "client.secret": 0o600, "server.public": 0o644, "client.public": 0o644}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_output_says_what_goes_where_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    assert run(["keys", str(keys)]) == 0
    printed = capsys.readouterr().out
    for text in ("--server.keys-dir", "--orchestrator.keys-dir", f"{keys}/client.secret", "server.public"):
        assert text in printed
    assert not any(path.read_text().strip() in printed for path in keys.glob("*.secret"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert rl("keys", str(tmp_path)).returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = rl("keys", str(tmp_path))
    assert result.returncode == ExitCode.USAGE
    assert "exists" in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_second_client_joins_the_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["keys", str(tmp_path)])
    run(["keys", str(tmp_path), "client-b"])
    assert "--orchestrator.key-name client-b" in capsys.readouterr().out
    assert CurveKeys.for_client(tmp_path, "client-b").public in CurveKeys.for_server(tmp_path).peers
    assert len(CurveKeys.for_server(tmp_path).peers) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["{folder}", "bob"], "must begin with `client`"),
        (["{folder}", "client/../../x"], "must begin with `client`"),
        (["{folder}/new", "client-b"], "make the first keys"),
        (["/proc/nowhere"], "cannot make keys"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(["keys", *(word.format(folder=tmp_path) for word in arguments)])
    assert list(tmp_path.iterdir()) == []


def test_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    run(["keys", "--help"])
    assert "usage" in capsys.readouterr().out


def test_rl_hands_the_orchestrators_keys_to_the_trainer() -> None:
    values = {
        "model": {"path": "m"},
        "orchestrator": {"envs": [{"id": "e"}], "server": {"endpoint": "tcp://0.0.0.0:7", "keys_dir": "keys"}},
        "trainer": {},
        "inference": {},
    }
    config = compose(find_services()).model_validate(values)
    link = config.services["trainer"].orchestrator  # type: ignore[attr-defined]
    assert (link.endpoint, link.keys_dir) == ("tcp://127.0.0.1:7", Path("keys"))


OPEN = "tcp://0.0.0.0:0"

OFTEN_S = 0.01
"""In the place of a minute."""

TIMES = 3

DEADLINE_S = 30.0


def reminders(warnings: list[str]) -> list[str]:
    return [line for line in warnings if "reachable from other machines" in line]


def test_a_minute_is_a_minute() -> None:
    assert exposure.REMINDER_S == 60.0


def test_batch_server(tmp_path: Path, warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    with Served(Outbox(tmp_path, RUN), OPEN, insecure=True, park_s=0.02) as served:
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)
        assert reminders(warnings_seen)[-1].startswith(served.endpoint)


def test_weight_server(warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    with WeightServer(OPEN, RUN, WeightStore(1), insecure=True) as open_server:
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)
        assert reminders(warnings_seen)[-1].startswith(open_server.endpoint)


def test_inference_server(warnings_seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "REMINDER_S", OFTEN_S)
    config = InferenceConfig(model={"path": "model"}, server={"host": "0.0.0.0", "insecure": True})
    with reminding_of_exposure(service.exposure(config)):
        until(lambda: len(reminders(warnings_seen)) >= TIMES, within_s=DEADLINE_S)


def test_servers_of_this_machine_have_nothing_to_say(warnings_seen: list[str]) -> None:
    num_threads = threading.active_count()
    with reminding_of_exposure(service.exposure(InferenceConfig(model={"path": "model"}))):
        assert threading.active_count() == num_threads
    assert reminders(warnings_seen) == []
