"""Mistakes on the command line, of every service: a `UserError` that names what is wrong, before anything is made.

That a `UserError` is one line and exit code 2 is shown by `tests/runtime/process/test_service.py`; wrong keys and
values of all kinds by `tests/runtime/config/test_config.py`.
"""

import re
from pathlib import Path

import pytest

from orchestrator.records.ledger import LEDGER_NAME, Ledger
from runtime.errors import UserError
from tests.cli.console import CONSOLE, resolve, run
from tests.orchestrator.builders import make_ticket
from transport.wire.ledger import CompletedPositions

ENV = ("--envs", '[{"id": "toy"}]')
LEDGER_USAGE = "usage: orchestrator ledger RUN_DIRECTORY"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with something that looks like a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("orchestrator", "--model.path", "nowhere", *ENV),
            "nowhere is not a Hugging Face folder: it has no tokenizer.json",
        ),
        (("orchestrator", "--model.path", "model", *ENV, "--batch-sise", "3"), "batch_size"),
        (("orchestrator", "ledger"), LEDGER_USAGE),
        (("orchestrator", "ledger", "a", "b"), LEDGER_USAGE),
        (("orchestrator", "ledger", "--unknown"), LEDGER_USAGE),
        (("trainer", "--model.path", "nothing"), "nothing is not a Hugging Face folder: it has no config.json"),
        (("trainer", "--model.path", "model", "--replay", "none"), "none is not a folder"),
        (("trainer", "--model.path", "model", "--optimizer.lrr", "1"), "optimizer.lr"),
        (("trainer", "--model.path", "model", "--schedule.type", "linear"), "needs max_steps"),
        (("trainer", "export", "--out", "out"), "either --checkpoint or --run"),
        (("inference", "--model.path", "nothing"), "no model at --model.path nothing"),
        (("inference", "--model.path", "model", "--engine", "vllm"), "tandem-rl[vllm]"),
        (("inference", "--model.path", "model", "--torch.max-batchsize", "3"), "did you mean torch.max_batch_size?"),
        (("inference", "--model.path", "model", "--server.port", "99999"), "server.port"),
    ],
    ids=" ".join,
)
def test_mistake_is_named_before_anything_is_made(words: tuple[str, ...], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        run(words)
    assert [path.name for path in folder.iterdir()] == ["model"]


@pytest.mark.parametrize("service", ["inference", "orchestrator", "trainer", "rl"])
def test_help_names_the_keys(service: str) -> None:
    assert "--run.name" in run([service, "--help"])


@pytest.mark.parametrize(
    ("words", "usual", "advanced"),
    [
        (("inference",), "--model.path", "--weights.chunk-bytes"),
        (("orchestrator",), "--envs[].id", "--engines.canary-tolerance"),
        (("orchestrator", "eval"), "--engines.openai.model", "--engines.max-retries"),
        (("trainer",), "--optimizer.lr", "--parallel.timeout-s"),
        (("rl",), "--trainer.optimizer.lr", "--trainer.parallel.timeout-s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_advanced_keys_are_in_help_all_only(words: tuple[str, ...], usual: str, advanced: str) -> None:
    shown, everything = (set(run([*words, flag]).split()) for flag in ("--help", "--help-all"))
    assert {usual, advanced} <= everything
    assert usual in shown
    assert advanced not in shown


def test_help_of_rl_has_a_shared_key_once() -> None:
    """What flows into a service from the top level, or from another service, is set there."""
    shown = set(run(["rl", "--help"]).split())
    assert {"--model.path", "--orchestrator.server.endpoint", "--trainer.model.seq-len"} <= shown
    assert not {"--trainer.model.path", "--inference.run.name", "--trainer.orchestrator.endpoint"} & shown


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("orchestrator", *ENV, "--max-staleness", "7"), "max_staleness", 7),
        (("trainer", "--max-steps", "7"), "max_steps", 7),
        (("inference", "--stall-timeout-s", "7"), "stall_timeout_s", 7),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_dry_run_prints_the_resolved_config_and_makes_nothing(
    words: tuple[str, ...], key: str, value: int, folder: Path
) -> None:
    resolved = resolve([*words, "--model.path", "nowhere"])
    assert (resolved[key], resolved["model"]["path"], resolved["run"]["name"]) == (value, "nowhere", "default")
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_ledger_command_explains_itself() -> None:
    assert run(["orchestrator", "ledger", "--help"]).startswith(LEDGER_USAGE)


def test_ledger_command_says_by_its_exit_code_whether_it_balances(folder: Path) -> None:
    path = folder / "ledger" / LEDGER_NAME
    path.parent.mkdir()
    ledger = Ledger(path, CompletedPositions())
    ledger.dispatched(make_ticket(0, size=4))
    ledger.close()
    assert "in_flight" in run(["orchestrator", "ledger", str(folder)])
    with path.open("a") as file:
        file.write('{"kind":"settled","seq":7,"states":["stale"]}\n')
    assert CONSOLE["orchestrator"](["ledger", str(folder)]) == 1
