"""Nothing binds beyond this machine without keys or a token, unless it is told to: one line and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from inference.config import InferenceConfig
from orchestrator.config.orchestrator import BatchServerConfig
from runtime.config.config import HealthConfig, resolved_json
from runtime.errors import ExitCode
from tests.faults.security.guarded_run import SERVICE
from tests.orchestrator.toys import make_config, write_config
from tests.support.process import process
from trainer.config.trainer import OrchestratorLinkConfig, WeightsConfig
from transport.security.exposure import is_local, reachable
from transport.security.keys import make_keys
from viewer.cli import _view_parser


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:29600", "tcp://*:29600", "tcp://10.0.0.3:1", "tcp://[::]:1"])
def test_batch_server_that_others_reach_needs_keys(endpoint: str) -> None:
    with pytest.raises(ValueError, match="reachable from other machines and has no keys: set keys_dir"):
        BatchServerConfig(endpoint=endpoint)
    assert BatchServerConfig(endpoint=endpoint, keys_dir=Path("keys")).keys_dir == Path("keys")
    assert BatchServerConfig(endpoint=endpoint, insecure=True).insecure


def test_keys_and_insecure_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="contradict"):
        BatchServerConfig(keys_dir=Path("keys"), insecure=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "gpu-node-7"])
def test_inference_server_that_others_reach_needs_a_token(host: str) -> None:
    model = {"path": "model"}
    with pytest.raises(ValueError, match="reachable from other machines: set admin_token_file"):
        InferenceConfig(model=model, server={"host": host})
    assert InferenceConfig(model=model, server={"host": host, "insecure": True}).server.is_exposed
    assert InferenceConfig(model=model, server={"host": host}, admin_token_file="token").server.is_exposed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_nothing(host: str) -> None:
    assert not InferenceConfig(model={"path": "model"}, server={"host": host}).server.is_exposed


def test_defaults_bind_loopback_only() -> None:
    assert is_local(BatchServerConfig().endpoint)
    assert not InferenceConfig(model={"path": "model"}).server.is_exposed
    assert is_local(f"http://{HealthConfig().host}:1")
    assert is_local(f"tcp://{WeightsConfig().host}:1")
    assert is_local(f"http://{_view_parser().parse_args(['run']).host}:1")


@pytest.mark.parametrize(
    ("bound", "used"),
    [
        ("tcp://*:5", "tcp://127.0.0.1:5"),
        ("tcp://0.0.0.0:5", "tcp://127.0.0.1:5"),
        ("http://:::5", "http://[::1]:5"),
        ("http://[::]:5", "http://[::1]:5"),
        ("http://[::1]:5", "http://[::1]:5"),
        ("tcp://10.0.0.3:5", "tcp://10.0.0.3:5"),
        ("ipc:///tmp/socket", "ipc:///tmp/socket"),
    ],
)
def test_wildcard_is_reached_through_loopback(bound: str, used: str) -> None:
    assert reachable(bound) == used


@pytest.mark.parametrize("name", ["server", "../client", "", "bob"])
def test_trainer_takes_no_key_but_a_clients(name: str) -> None:
    with pytest.raises(ValueError, match="key_name"):
        OrchestratorLinkConfig(key_name=name)


def test_open_orchestrator_is_exit_2_and_one_line() -> None:
    flags = ("--server.endpoint", "tcp://0.0.0.0:0", "--model.path", "x", "--envs", '[{"id": "toy"}]')
    result = run("orchestrator", *flags)
    assert result.returncode == ExitCode.USAGE
    assert len(result.stderr.strip().splitlines()) == 1
    assert "reachable from other machines" in result.stderr
    assert "rl keys" in result.stderr


def test_open_inference_server_is_exit_2_and_one_line() -> None:
    result = run("inference", "--server.host", "0.0.0.0", "--model.path", "x")
    assert result.returncode == ExitCode.USAGE
    assert len(result.stderr.strip().splitlines()) == 1
    assert "admin_token_file" in result.stderr


@pytest.mark.parametrize("missing", ["server.secret", "server.public", "client.public"])
def test_orchestrator_names_the_key_file_that_is_missing(tmp_path: Path, missing: str) -> None:
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / missing).unlink()
    config = make_config(tmp_path, server={"keys_dir": str(tmp_path / "keys")})
    result = run(SERVICE, "@", str(write_config(config, tmp_path)))
    assert result.returncode == ExitCode.USAGE
    assert len(result.stderr.strip().splitlines()) == 1
    assert "server.keys_dir" in result.stderr
    assert (missing if missing != "client.public" else "client*.public") in result.stderr


def test_trainer_names_the_key_file_that_is_missing_before_it_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "client.secret").chmod(0o644)
    result = run("trainer", "--model.path", str(tmp_path), "--orchestrator.keys-dir", str(tmp_path / "keys"))
    assert result.returncode == ExitCode.USAGE
    assert "orchestrator.keys_dir" in result.stderr
    assert "client.secret can be read by others" in result.stderr


@pytest.mark.integration
def test_insecure_orchestrator_starts_and_says_so(tmp_path: Path) -> None:
    config = make_config(tmp_path, server={"endpoint": "tcp://0.0.0.0:0", "insecure": True})
    log = tmp_path / "toy" / "logs" / "orchestrator.log"
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as child:
        said = "has no keys and is reachable from other machines (insecure = true)"
        child.until(lambda: log.exists() and said in log.read_text())


@pytest.mark.integration
def test_secrets_are_in_no_file_but_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    config = make_config(
        tmp_path, server={"endpoint": "tcp://127.0.0.1:0", "keys_dir": str(keys)}, log={"level": "TRACE"}
    )
    written = [tmp_path / "toy" / name for name in ("services/orchestrator.json", "logs/orchestrator.log")]
    with process(tmp_path / "out", SERVICE, "@", str(write_config(config, tmp_path))) as child:
        child.until(lambda: all(path.exists() for path in written))
    secrets = [path.read_bytes().strip() for path in keys.glob("*.secret")]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".secret"]
    assert {path.name for path in files} >= {"orchestrator.json", "orchestrator.log", "out"}
    assert [path for path in files if any(secret in path.read_bytes() for secret in secrets)] == []
    assert str(keys) in resolved_json(config)
