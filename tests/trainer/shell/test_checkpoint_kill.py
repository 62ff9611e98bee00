"""`kill -9` at every phase of a save, in a child that does nothing but train and save."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.waiting import until
from tests.trainer.shell.tiny import Tiny, make_checkpoints
from trainer.checkpoint_manifest import MANIFEST_NAME
from trainer.config import OptimizerConfig
from trainer.optimizer import make_optimizer
from trainer.progress import Progress

pytestmark = pytest.mark.integration
SIZE = 512


def make_large(seed: int) -> Tiny:
    """A few megabytes, so that a save takes long enough to be cut."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, SIZE), nn.Linear(SIZE, SIZE))
    return Tiny(model, make_optimizer(model, OptimizerConfig(lr=1e-2)))


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork that never returns to pytest; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def save_for_ever(root: Path, model_path: Path) -> None:
    tiny = make_large(seed=0)
    checkpoints = make_checkpoints(root, model_path)
    progress = checkpoints.resume(tiny.model, tiny.optimizer)
    for step in itertools.count(progress.step + 1):
        tiny.step()
        checkpoints.save(tiny.model, tiny.optimizer, Progress(step=step))


def newest_step(root: Path) -> int:
    return max((int(path.parent.name[5:]) for path in root.glob(f"step-*/{MANIFEST_NAME}")), default=0)


def has_reached(root: Path, step: int, name: str) -> bool:
    """Whether the save of `step` has written `name`, now or in the past."""
    return (root / f"step-{step:08d}" / name).exists() or newest_step(root) > step


@pytest.mark.parametrize(
    "last_seen", ["progress.json", "hf/config.json", "shard-00001-model-00001-of-00001.safetensors", MANIFEST_NAME]
)
def test_a_killed_save_leaves_a_valid_checkpoint_that_training_continues_from(tmp_path, model_path, last_seen):
    root = tmp_path / "checkpoints"
    committed = 0
    for _ in range(3):
        child = in_child(lambda: save_for_ever(root, model_path))
        target = committed + 2
        until(lambda step=target: has_reached(root, step, last_seen), within_s=60)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

        before = newest_step(root)
        tiny = make_large(seed=1)
        progress = make_checkpoints(root, model_path).resume(tiny.model, tiny.optimizer)
        assert progress.step == before > committed
        assert tiny.optimizer.state[tiny.model[0].weight]["step"].item() == before
        committed = before
