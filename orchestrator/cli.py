"""`orchestrator @ file.toml --flags`, `orchestrator eval @ file.toml`, `orchestrator ledger RUN`,
`orchestrator check-advantage IMPORT_PATH`.

Environments (verifiers takes seconds to import) are loaded once the config is known to be good, so that `--help`,
`--dry-run` and mistakes answer at once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator.config.advantage import CustomAdvantageConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from runtime.config.config import load_config, parse_config
from runtime.errors import UserError
from runtime.process.service import run_main
from runtime.process.shutdown import ending_at_once

SWITCH_INTERVAL_S = 0.001
"""Python hands the interpreter from one busy thread to another every 5 ms by default. The event loop gives it up at
every system call, hundreds of times while a thread encodes a batch: a fifth of that takes most of the waits out of its
lag."""


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main("orchestrator", run)


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; the exit code."""
    if argv[:1] == ["ledger"]:
        return ledger(argv[1:])
    if argv[:1] == ["check-advantage"]:
        return check_advantage(argv[1:])
    if argv[:1] == ["eval"]:
        from orchestrator.eval.command import main as evaluate

        return evaluate(argv[1:])
    config = load_config(OrchestratorConfig, argv, prog="orchestrator")
    check_paths(config)
    with ending_at_once():
        from orchestrator.service import serve

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    serve(config)
    return 0


def ledger(argv: Sequence[str]) -> int:
    """`orchestrator ledger RUN`: 0 if every rollout is accounted for, 1 if not."""
    usage = "usage: orchestrator ledger RUN_DIRECTORY (for example runs/default)"
    if list(argv) in (["--help"], ["-h"]):
        print(usage)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UserError(usage)
    from orchestrator.records.ledger_report import report_ledger

    return report_ledger(Path(argv[0]))


def check_advantage(argv: Sequence[str]) -> int:
    """`orchestrator check-advantage IMPORT_PATH [--kwargs JSON]`: 0 if the function keeps every promise, 1 if not."""
    from orchestrator.advantages.functions import make_advantage
    from orchestrator.advantages.invariance import check_advantage as run_checks

    positional = ["--import-path"] if argv[:1] and not argv[0].startswith(("-", "@")) else []
    config = parse_config(CustomAdvantageConfig, positional + list(argv), prog="orchestrator check-advantage")
    checks = list(run_checks(make_advantage(config)))
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.detail}")
    num_failed = sum(not check.passed for check in checks)
    print(f"{config.import_path}: {len(checks) - num_failed} of {len(checks)} checks passed")
    return 1 if num_failed else 0


def check_paths(config: OrchestratorConfig) -> None:
    """Raise `UserError` for a path that cannot be right, before anything slow is loaded."""
    if not (config.model.path / "tokenizer.json").is_file():
        raise UserError(f"model.path = {config.model.path} is not a Hugging Face folder: it has no tokenizer.json")
