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
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import msgspec
from loguru import logger

from runtime.errors import StorageError
from trainer.checkpoints.manifest import (
    FORMAT,
    MANIFEST_NAME,
    NEWEST_NAME,
    CheckpointManifest,
    FileEntry,
    checkpoint_dir,
    describe_file,
    find_newest,
)
from trainer.checkpoints.state import TrainState, load_tensors, save_tensors
from trainer.config.trainer import CheckpointConfig
from trainer.ranks import BackgroundCall, Ranks
from trainer.step.report import TrainProgress
from trainer.weights.adapter import ADAPTER_FILE, Adapter, check_same_adapter, read_adapter
from transport.backoff import Backoff
from transport.durable import atomic_write, sync_directory

BACKOFF = Backoff(1.0, 60.0)
"""Before a step is saved again that could not be saved: the run is at its end. No jitter, ranks save together."""
MAX_FAILURES = 3
"""Failed saves in a row after which the trainer stops with exit code 74."""
JOIN_TIMEOUT_S = 600.0
"""Seconds that a save may still take when it is waited for."""
PROGRESS_NAME = "progress.json"
HF_NAME = "hf"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}
_INDEX = ".index.json"
_MAX_BYTES = 64 << 20
"""A larger file is neither a config nor a tokenizer."""


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says about the run that wrote it."""

    run_id: str
    config_digest: str
    model_path: Path
    adapter: Adapter | None = None


class Checkpoints:
    """Checkpoints of one run below `root`, and the commit of each: the function given to `report_commits` is called
    with a step as soon as `save`, `saved` or `finish` sees that its checkpoint is durable. All methods but `due` and
    `report_commits` are collective: every rank calls them."""

    def __init__(self, root: Path, origin: Origin, config: CheckpointConfig, ranks: Ranks) -> None:
        self._root = root
        self._origin = origin
        self._config = config
        self._ranks = ranks
        self._apart = ranks.apart()  # for the thread of a save, and for torch, whose ranks wait for each other
        self._running: tuple[int, BackgroundCall[None]] | None = None
        """Step and end of the save that was begun."""
        self._num_failures = 0
        self._failed_step: int | None = None
        self._last_committed = 0
        self._tell: Callable[[int], None] | None = None

    def report_commits(self, tell: Callable[[int], None]) -> None:
        """From now on, call `tell(step)` on every rank when the checkpoint of `step` is durable."""
        self._tell = tell

    def due(self, step: int) -> bool:
        """Whether to save after `step`: at the interval, and after a save that failed."""
        return step % self._config.interval_steps == 0 or self._num_failures > 0

    def save(self, state: TrainState, progress: TrainProgress) -> None:
        """Save `progress`, after the save before has ended; unless `background`, wait for the end of this save."""
        self.saved(wait=True)
        if self._last_committed < progress.step:
            self.begin(state, progress)
            self.saved(wait=not self._config.background)

    def finish(self, state: TrainState, progress: TrainProgress) -> None:
        """Return once `progress` is committed. `StorageError` if that cannot be."""
        while self._last_committed < progress.step:
            self.save(state, progress)
            self.saved(wait=True)

    def begin(self, state: TrainState, progress: TrainProgress) -> None:
        """Save `state` as it is now, with `background` a copy of it while training goes on; `saved` tells the outcome.
        Only one save may be under way. `StorageError` after `MAX_FAILURES` failed saves in a row."""
        assert self._running is None, "one save at a time: ask `saved` for the end of the one before"
        step, folder = progress.step, self.folder(progress.step)
        if step == self._failed_step:
            time.sleep(BACKOFF.pause_s(self._num_failures))
        try:
            self._ranks.together(lambda: self._prepare(folder, progress))
            written = save_tensors(folder, state, self._apart, background=self._config.background)
        except StorageError as error:
            self._failed(step, error)
            return

        def work() -> None:
            written()
            self._seal(folder, step)

        self._running = step, BackgroundCall(work, f"checkpoint {step}")

    def saved(self, *, wait: bool = False) -> int | None:
        """The step of the save that was begun, once it is durable; told once. `None`: none is under way, it goes on, or
        it has failed (`StorageError` after `MAX_FAILURES` in a row). `wait`: do not return while it goes on."""
        if self._running is None:
            return None
        step, call = self._running
        if not wait and self._ranks.any(not call.done()):
            return None
        self._ranks.wait_together(lambda: _join(step, call))
        self._running = None
        try:
            self._ranks.together(lambda: _outcome(call))
        except StorageError as error:
            self._failed(step, error)
            return None
        self._num_failures, self._failed_step = 0, None
        self._commit(step)
        return step

    def _commit(self, step: int) -> None:
        self._last_committed = step
        if self._tell is not None:
            self._tell(step)
        if self._ranks.is_first:
            logger.debug(f"checkpoint {self.folder(step)}")

    def _failed(self, step: int, error: StorageError) -> None:
        self._ranks.wait_together(lambda: self._give_back(self.folder(step)))
        self._num_failures, self._failed_step = self._num_failures + 1, step
        logger.warning(f"checkpoint {step} failed ({self._num_failures} of {MAX_FAILURES}): {error}")
        if self._num_failures >= MAX_FAILURES:
            raise StorageError(
                f"{self._num_failures} checkpoints in a row could not be written to {self._root}: {error}"
            ) from error

    def resume(self, state: TrainState) -> TrainProgress:
        """Load the newest valid checkpoint in place; fresh progress if the run never completed one.

        Raises `UserError` if there are checkpoints and none may be used, or it has no critic and there should be one.
        """
        manifest = find_newest(self._root, self._origin.run_id, self._ranks)
        if manifest is None:
            return TrainProgress()
        if manifest.config_digest != self._origin.config_digest and self._ranks.is_first:
            logger.warning(f"checkpoint {manifest.step} was written with another config of model, loss or optimizer")
        folder = checkpoint_dir(self._root, manifest.step)
        check_same_adapter(folder, read_adapter(folder), self._origin.adapter)
        load_tensors(folder, state, self._apart)
        self._last_committed = manifest.step
        return msgspec.json.decode((folder / PROGRESS_NAME).read_bytes(), type=TrainProgress)

    def folder(self, step: int) -> Path:
        return checkpoint_dir(self._root, step)

    def _seal(self, folder: Path, step: int) -> None:
        """All tensors are written: describe every file, then the manifest. In a thread, so over `_apart`."""
        parts = self._apart.together(lambda: self._describe_share(folder))
        files = [entry for part in parts for entry in msgspec.json.decode(part, type=list[FileEntry])]
        self._apart.together(lambda: self._complete(folder, step, files))

    def _prepare(self, folder: Path, progress: TrainProgress) -> bytes:
        if self._ranks.is_first:
            _remove(folder)
            (folder / HF_NAME).mkdir(parents=True)
            atomic_write(folder / PROGRESS_NAME, msgspec.json.encode(progress))
            copy_model_files(self._origin.model_path, folder / HF_NAME)
            if self._origin.adapter is not None:
                atomic_write(folder / ADAPTER_FILE, msgspec.json.encode(self._origin.adapter))
        return b""

    def _give_back(self, folder: Path) -> None:
        """Delete what a failed save has written: the next one needs the room."""
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


def _join(step: int, call: BackgroundCall[None]) -> None:
    """Wait for the end of a save. `StorageError` if it takes too long: its thread still has the process group, so no
    other save can begin, and the run must end."""
    futures.wait([call], JOIN_TIMEOUT_S)
    if not call.done():
        raise StorageError(f"checkpoint {step} is not written after {JOIN_TIMEOUT_S:g} s more")


def _outcome(call: BackgroundCall[None]) -> bytes:
    """Raise `OSError` if the disk refused the save, which has ended."""
    try:
        call.result()
    except StorageError as error:
        raise OSError(str(error)) from error
    return b""


def _remove(folder: Path) -> None:
    """The manifest goes first: a removal that is cut short leaves no folder that looks complete."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def copy_model_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat template and the like, durably, so that the model can be exported from `target`."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not _is_weights(path) and path.stat().st_size <= _MAX_BYTES:
            atomic_write(target / path.name, path.read_bytes())


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith(_INDEX) or path.name.startswith(".")
