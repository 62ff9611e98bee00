"""`Checkpoints`: durable training state, and the way back to it.

    step-00000010/   shard-<rank>-model-<n>-of-<n>.safetensors   model, optimizer, critic, random state (torch DCP)
                     progress.json   `Progress`
                     hf/             config and tokenizer of the model, for the export
                     adapter.json    `Adapter`, if the run trains one: then the model is only that
                     manifest.json   sizes and hashes of all the above; written last
    newest.json      {"step": 10}: a checkpoint was once complete, so its absence is a loss and not a fresh start

Everything is synced before the manifest appears by rename. A failed save leaves the older checkpoints alone and no file
of its own behind, and is tried again at the next step.
"""

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from loguru import logger
from torch import nn

from runtime.atomic_write import atomic_write, sync_directory
from runtime.errors import StorageError
from trainer.adapter import ADAPTER_FILE, Adapter, check_same_adapter, read_adapter
from trainer.background_save import BackgroundSave
from trainer.checkpoint_manifest import (
    FORMAT,
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    checkpoint_dir,
    describe_file,
)
from trainer.checkpoint_search import NEWEST_NAME, find_newest
from trainer.checkpoint_state import begin_saving_tensors, load_tensors, save_tensors
from trainer.config import CheckpointConfig
from trainer.critic.learner import CriticLearner
from trainer.distributed import Ranks
from trainer.hf_folder import copy_model_files
from trainer.progress import Progress

RETRY_PAUSE_S = 1.0
"""Pause before a step is saved again that could not be saved, doubled each time: the run is at its end."""
MAX_RETRY_PAUSE_S = 60.0
PROGRESS_NAME = "progress.json"
HF_NAME = "hf"


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says about the run that wrote it."""

    run_id: str
    config_digest: str
    model_path: Path
    adapter: Adapter | None = None


class Checkpoints:
    """Checkpoints of one run below `root`. All methods but `due` are collective: every rank calls them."""

    def __init__(self, root: Path, origin: Origin, config: CheckpointConfig, ranks: Ranks) -> None:
        self._root = root
        self._origin = origin
        self._config = config
        self._ranks = ranks
        self._apart = ranks.apart()  # for torch, whose ranks wait for each other while they write and read
        self._running: BackgroundSave | None = None
        self._num_failures = 0
        self._failed_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether to save after `step`: at the interval, and after a save that failed."""
        return step % self._config.interval_steps == 0 or self._num_failures > 0

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        critic: CriticLearner | None = None,
    ) -> bool:
        """Whether the checkpoint is durable. `StorageError` after `max_failures` failed saves in a row."""
        if progress.step == self._failed_step:
            time.sleep(min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (self._num_failures - 1)))
        try:
            self._save(model, optimizer, progress, critic)
        except StorageError as error:
            self._failed(progress.step, error)
            return False
        self._num_failures, self._failed_step = 0, None
        return True

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        critic: CriticLearner | None = None,
    ) -> None:
        """Copy the state as it is now and save the copy while training goes on; `saved` tells how it ended. Only one
        may be under way. `StorageError` as `save`."""
        assert self._running is None, "one save at a time: ask `saved` for the end of the one before"
        folder = self.folder(progress.step)
        try:
            self._ranks.together(lambda: self._prepare(folder, progress))
            written = begin_saving_tensors(folder, model, optimizer, self._apart, critic)
        except StorageError as error:
            self._failed(progress.step, error)
            return

        def work() -> None:
            written()
            self._seal(folder, progress.step, self._apart)

        self._running = BackgroundSave(progress.step, work)

    def saved(self, *, wait: bool = False) -> int | None:
        """The step of the save that was begun, once it is durable; told once. `None`: none is under way, it goes on, or
        it has failed (`StorageError` after `max_failures` in a row). `wait`: do not return while it goes on."""
        running = self._running
        if running is None or not (wait or self._done_everywhere(running)):
            return None
        self._running = None
        running.join()
        try:
            self._ranks.together(running.outcome)
        except StorageError as error:
            self._failed(running.step, error)
            return None
        self._num_failures, self._failed_step = 0, None
        return running.step

    def _done_everywhere(self, running: BackgroundSave) -> bool:
        return not self._ranks.any(not running.is_done)

    def _failed(self, step: int, error: StorageError) -> None:
        self._ranks.wait_together(lambda: self._give_back(self.folder(step)))
        self._num_failures, self._failed_step = self._num_failures + 1, step
        logger.warning(f"checkpoint {step} failed ({self._num_failures} of {self._config.max_failures}): {error}")
        if self._num_failures >= self._config.max_failures:
            raise StorageError(
                f"{self._num_failures} checkpoints in a row could not be written to {self._root}: {error}"
            ) from error

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, critic: CriticLearner | None = None
    ) -> Progress:
        """Load the newest valid checkpoint in place; fresh progress if the run never completed one.

        Raises `UserError` if there are checkpoints and none may be used, or it has no critic and there should be one.
        """
        manifest = find_newest(self._root, self._origin.run_id, self._config.resume, self._ranks)
        if manifest is None:
            return Progress()
        if manifest.config_digest != self._origin.config_digest and self._ranks.is_first:
            logger.warning(f"checkpoint {manifest.step} was written with another config of model, loss or optimizer")
        folder = checkpoint_dir(self._root, manifest.step)
        check_same_adapter(folder, read_adapter(folder), self._origin.adapter)
        load_tensors(folder, model, optimizer, self._apart, critic)
        return msgspec.json.decode((folder / PROGRESS_NAME).read_bytes(), type=Progress)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return checkpoint_dir(self._root, step)

    def _save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, critic: CriticLearner | None
    ) -> None:
        folder = self.folder(progress.step)
        self._ranks.together(lambda: self._prepare(folder, progress))
        save_tensors(folder, model, optimizer, self._apart, critic)
        self._seal(folder, progress.step, self._ranks)

    def _seal(self, folder: Path, step: int, ranks: Ranks) -> None:
        """All tensors are written: describe every file, then the manifest."""
        parts = ranks.together(lambda: self._describe_share(folder))
        files = [entry for part in parts for entry in msgspec.json.decode(part, type=list[FileEntry])]
        ranks.together(lambda: self._complete(folder, step, files))

    def _prepare(self, folder: Path, progress: Progress) -> bytes:
        if self._ranks.is_first:
            _remove(folder)
            (folder / HF_NAME).mkdir(parents=True)
            atomic_write(folder / PROGRESS_NAME, msgspec.json.encode(progress))
            copy_model_files(self._origin.model_path, folder / HF_NAME)
            if self._origin.adapter is not None:
                atomic_write(folder / ADAPTER_FILE, msgspec.json.encode(self._origin.adapter))
        return b""

    def _give_back(self, folder: Path) -> None:
        """What a failed save has written takes the room that the next one needs."""
        if self._ranks.is_first and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)

    def _describe_share(self, folder: Path) -> bytes:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        share = files[self._ranks.rank :: self._ranks.world_size]
        return msgspec.json.encode([describe_file(folder, path) for path in share])

    def _complete(self, folder: Path, step: int, files: Iterable[FileEntry]) -> bytes:
        if self._ranks.is_first:
            manifest = CheckpointManifest(
                format=FORMAT,
                run_id=self._origin.run_id,
                step=step,
                world_size=self._ranks.world_size,
                config_digest=self._origin.config_digest,
                files=tuple(sorted(files, key=lambda entry: entry.path)),
            )
            sync_directory(folder)
            atomic_write(folder / MANIFEST_NAME, msgspec.json.encode(manifest))
            sync_directory(self._root)
            atomic_write(self._root / NEWEST_NAME, msgspec.json.encode({"step": step}))
            self._retain(step)
        return b""

    def _retain(self, step: int) -> None:
        """Keep the newest complete ones up to `step`; later folders were skipped as invalid when the run resumed."""
        complete = {path for path in self._root.glob("step-*") if (path / MANIFEST_NAME).exists()}
        kept = sorted(path for path in complete if path <= self.folder(step))[-self._config.keep :]
        for path in self._root.glob("step-*"):
            if path not in kept:
                try:
                    _remove(path)
                except OSError as error:  # the new checkpoint is durable: what cannot be removed only takes room
                    logger.warning(f"old checkpoint {path} stays: {error}")


def _remove(folder: Path) -> None:
    """The manifest goes first: a removal that is cut short leaves no folder that looks complete."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
