"""A model and an optimizer small enough to train in a test of one part."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.state import TrainState
from trainer.config.model import OptimizerConfig
from trainer.config.trainer import CheckpointConfig
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks
from trainer.step.report import TrainProgress

ALONE = Ranks(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Tiny(TrainState):
    """Something to train: tied weights, a buffer, and dropout, so that the random state matters."""

    def step(self) -> None:
        """One optimizer step on noise."""
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all weights and moments."""
        moments = {
            f"{i}.{key}": value for i, state in enumerate(self.optimizer.state.values()) for key, value in state.items()
        }
        return {key: value.detach().clone() for key, value in (self.model.state_dict() | moments).items()}


class TiedModel(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(6))
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Any function of all parameters."""
        return self.second(self.dropout(torch.relu(self.first(values) * self.scale)))


def make_tiny(seed: int = 0) -> Tiny:
    """Fresh, with weights that depend on `seed`."""
    torch.manual_seed(seed)
    model = TiedModel()
    return Tiny(model, make_optimizer(model, OptimizerConfig(lr=1e-2)))


def make_checkpoints(root: Path, model_path: Path, run_id: str = "run", **config: object) -> Checkpoints:
    """Checkpoints below `root`."""
    root.mkdir(exist_ok=True)
    return Checkpoints(root, Origin(run_id, "digest", model_path), CheckpointConfig(**config), ALONE)


def save(checkpoints: Checkpoints, state: TrainState, step: int) -> bool:
    """Save `state` as that of `step`; whether it is durable."""
    checkpoints.begin(state, TrainProgress(step=step))
    return checkpoints.saved(wait=True) == step


def train_and_save(tiny: Tiny, checkpoints: Checkpoints, steps: range) -> None:
    """Train and save each step of `steps`."""
    for step in steps:
        tiny.step()
        assert save(checkpoints, tiny, step)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
