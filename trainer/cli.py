"""`trainer @ file.toml ...`, `torchrun --nproc-per-node N -m trainer @ file.toml ...`, `trainer export ...`.

Torch is imported only once the config is known to be good: `--help`, `--dry-run` and mistakes answer at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runtime.config import load_config, parse_config
from runtime.errors import UserError
from runtime.service import run_main
from trainer.config import ExportConfig, TrainerConfig


def main() -> NoReturn:
    """Entry point of the console script."""
    run_main("trainer", run)


def run(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; the exit code."""
    if argv[:1] == ["export"]:
        return export(parse_config(ExportConfig, argv[1:], prog="trainer export"))
    config = load_config(TrainerConfig, argv, prog="trainer")
    check_paths(config)
    from trainer.service import run_trainer

    return run_trainer(config)


def export(config: ExportConfig) -> int:
    """`trainer export`."""
    from trainer.export import export_checkpoint, newest_checkpoint

    checkpoint = config.checkpoint or newest_checkpoint((config.run or Path()) / "checkpoints")
    manifest = export_checkpoint(checkpoint, config.out)
    print(f"exported step {manifest.step} of run {manifest.run_id} from {checkpoint} to {config.out}")
    return 0


def check_paths(config: TrainerConfig) -> None:
    """Raise `UserError` for a path that cannot be right, before anything heavy is loaded."""
    if not (config.model.path / "config.json").is_file():
        raise UserError(f"model.path = {config.model.path} is not a Hugging Face folder: it has no config.json")
    if config.replay is not None and not config.replay.is_dir():
        raise UserError(f"replay = {config.replay} is not a folder")
    if config.orchestrator.keys_dir is not None:
        from trainer.link_keys import load_keys  # zmq: `--help` answers without it

        load_keys(config.orchestrator)
