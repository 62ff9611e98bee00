"""Which checkpoint to resume from: the newest one that is whole, with a reason for each that is not."""

import re
from pathlib import Path

from loguru import logger

from runtime.errors import UserError
from trainer.checkpoint_manifest import CheckpointManifest, read_manifest, verify_files
from trainer.distributed import Ranks
from trainer.errors import CheckpointInvalid

NEWEST_NAME = "newest.json"
_FOLDER = re.compile(r"step-(\d{8,})")


def find_newest(root: Path, run_id: str | None, ranks: Ranks) -> CheckpointManifest | None:
    """The newest valid checkpoint of `run_id` (`None`: of any run), verified by all ranks together; `None` if the run
    never completed one. Raises `UserError` if it has completed some and none is valid."""
    reasons = []
    for folder in _newest_first(root, ranks):
        manifest, reason = _verify(folder, run_id, ranks)
        if manifest is not None:
            return manifest
        reasons.append(f"{folder.name}: {reason}")
        if ranks.is_first:
            logger.warning(f"skipping checkpoint {folder.name}: {reason}")
    if ranks.any((root / NEWEST_NAME).exists()):
        found = "; ".join(reasons) or "all folders are gone"
        raise UserError(
            f"no valid checkpoint in {root} ({found}), but the run had one: restore a checkpoint, or move {root} away "
            "and use another --run.name to start from step 0"
        )
    return None


def _newest_first(root: Path, ranks: Ranks) -> list[Path]:
    """Folders as the first rank sees them, so that all ranks look at the same ones."""
    names = sorted(path.name for path in root.glob("step-*") if _FOLDER.fullmatch(path.name))
    listed = ranks.gather("\n".join(reversed(names)).encode())[0].decode()
    return [root / name for name in listed.split("\n") if name]


def _verify(folder: Path, run_id: str | None, ranks: Ranks) -> tuple[CheckpointManifest | None, str]:
    """The manifest, or the reason why the checkpoint is not valid. Each rank verifies its share of the files."""

    def verify_share() -> tuple[CheckpointManifest | None, str]:
        try:
            manifest = read_manifest(folder)
            if run_id not in (None, manifest.run_id):
                raise CheckpointInvalid(f"belongs to run {manifest.run_id!r}")
            verify_files(folder, manifest.files[ranks.rank :: ranks.world_size])
        except CheckpointInvalid as error:
            return None, str(error)
        return manifest, ""

    manifest, reason = ranks.wait_together(verify_share)  # files are of different size, and disks of different speed
    reasons = [text.decode() for text in ranks.gather(reason.encode()) if text]
    return (None, "; ".join(dict.fromkeys(reasons))) if reasons else (manifest, "")
