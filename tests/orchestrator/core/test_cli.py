"""The command line: quick answers, one line for a mistake, no heavy imports."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.ledger import LEDGER_NAME, Ledger
from runtime.exit_codes import ExitCode
from tests.orchestrator.core.builders import make_ticket
from tests.orchestrator.core.toys import make_config, write_config
from transport.positions import Done

CLI = ("-m", "orchestrator")
TOY = ("-m", "tests.orchestrator.core.toy_service")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def is_one_clear_line(result: subprocess.CompletedProcess[str], *texts: str) -> bool:
    """Exit code 2 and the texts in the one line that is not part of the log."""
    lines = result.stderr.strip().splitlines()
    return (
        result.returncode == ExitCode.USAGE
        and "Traceback" not in result.stderr
        and len(lines) >= 1
        and all(text in lines[-1] for text in texts)
    )


def test_the_cli_imports_neither_torch_nor_verifiers_nor_zmq() -> None:
    code = (
        "import sys, orchestrator.cli; print(sorted({'torch', 'transformers', 'verifiers', 'zmq'} & set(sys.modules)))"
    )
    assert run("-c", code).stdout.strip() == "[]"


def test_the_service_itself_never_imports_torch() -> None:
    code = "import sys, orchestrator.service; print(sorted({'torch', 'transformers', 'verifiers'} & set(sys.modules)))"
    assert run("-c", code).stdout.strip() == "[]"


def test_help_names_the_keys() -> None:
    result = run(*CLI, "--help")
    assert result.returncode == 0
    assert "--max-staleness" in result.stdout


def test_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('batch_sise = 3\nenvs = [{id = "toy"}]\nmodel = {path = "x"}\n')
    result = run(*CLI, "@", str(tmp_path / "bad.toml"))
    assert is_one_clear_line(result, "batch_sise", "batch_size"), result.stderr


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    path = write_config(make_config(tmp_path, model={"path": str(tmp_path / "nowhere")}), tmp_path)
    result = run(*CLI, "@", str(path))
    assert is_one_clear_line(result, "nowhere", "no tokenizer.json"), result.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        path = write_config(make_config(tmp_path, server={"endpoint": endpoint}), tmp_path)
        result = run(*TOY, "@", str(path))
    assert is_one_clear_line(result, endpoint, "--server.endpoint"), result.stderr


def test_a_health_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        path = write_config(make_config(tmp_path, health={"port": port}), tmp_path)
        result = run(*TOY, "@", str(path))
    assert is_one_clear_line(result, str(port), "--health.port"), result.stderr


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("--unknown",)])
def test_the_ledger_command_explains_itself(arguments: tuple[str, ...]) -> None:
    assert is_one_clear_line(run(*CLI, "ledger", *arguments), "usage: orchestrator ledger RUN_DIRECTORY")


def test_help_of_the_ledger_command_is_no_mistake() -> None:
    result = run(*CLI, "ledger", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: orchestrator ledger RUN_DIRECTORY")


def test_the_ledger_command_says_by_its_exit_code_whether_it_balances(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    path = tmp_path / "ledger" / LEDGER_NAME
    ledger = Ledger(path, Done())
    ledger.dispatched(make_ticket(0, size=4))
    ledger.close()
    good = run(*CLI, "ledger", str(tmp_path))
    assert good.returncode == 0, good.stderr
    assert "in_flight" in good.stdout
    with path.open("a") as file:
        file.write('{"kind":"settled","seq":7,"states":["stale"]}\n')
    assert run(*CLI, "ledger", str(tmp_path)).returncode == 1
