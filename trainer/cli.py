"""`trainer @ file.toml ...`, `torchrun --nproc-per-node N -m trainer @ file.toml ...`, `trainer export ...`,
`trainer check-loss IMPORT_PATH`.

Torch is imported only once the config is known to be good: `--help`, `--dry-run` and mistakes answer at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runtime.config.config import load_config, parse_config
from runtime.errors import UserError
from runtime.process.service import run_main
from runtime.process.shutdown import ending_at_once
from trainer.config.trainer import CheckLossConfig, ExportConfig, TrainerConfig


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main("trainer", run)


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; the exit code."""
    if argv[:1] == ["export"]:
        return export(parse_config(ExportConfig, argv[1:], prog="trainer export"))
    if argv[:1] == ["check-loss"]:
        positional = ["--import-path"] if argv[1:2] and not argv[1].startswith(("-", "@")) else []
        return check_loss(parse_config(CheckLossConfig, positional + list(argv[1:]), prog="trainer check-loss"))
    config = load_config(TrainerConfig, argv, prog="trainer")
    check_paths(config)
    with ending_at_once():
        from trainer.service import run_trainer

    return run_trainer(config)


def export(config: ExportConfig) -> int:
    """`trainer export`: write a checkpoint as a Hugging Face folder; the exit code."""
    from trainer.checkpoints.export import export_checkpoint, newest_checkpoint

    checkpoint = config.checkpoint or newest_checkpoint((config.run or Path()) / "checkpoints")
    manifest = export_checkpoint(checkpoint, config.out, merged=config.merged, base=config.base)
    print(f"exported step {manifest.step} of run {manifest.run_id} from {checkpoint} to {config.out}")
    return 0


def check_loss(config: CheckLossConfig) -> int:
    """`trainer check-loss`: 0 if the loss keeps every promise, 1 if not."""
    from trainer.checks.loss import check_loss as run_checks
    from trainer.losses.factory import load_custom_loss

    checks = list(run_checks(load_custom_loss(config.import_path, config.kwargs)))
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.detail}")
    num_failed = sum(not check.passed for check in checks)
    print(f"{config.import_path}: {len(checks) - num_failed} of {len(checks)} checks passed")
    return 1 if num_failed else 0


def check_paths(config: TrainerConfig) -> None:
    """Raise `UserError` for a path that cannot be right, before anything heavy is loaded."""
    if not (config.model.path / "config.json").is_file():
        raise UserError(f"model.path = {config.model.path} is not a Hugging Face folder: it has no config.json")
    if config.replay is not None and not config.replay.is_dir():
        raise UserError(f"replay = {config.replay} is not a folder")
    if config.orchestrator.keys_dir is not None:
        from trainer.batches.link_keys import load_keys  # zmq: `--help` answers without it

        load_keys(config.orchestrator)
