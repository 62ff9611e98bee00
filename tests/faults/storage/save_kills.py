"""`kill -9` in checkpoint saves, and what is left.

A child trains and saves at every step, and says so on a pipe; it is killed some random time after a save has begun, or
when the save has written a given file. The parent then resumes as a new trainer would. Training is deterministic, so
the state it finds must be, bit for bit, that of the same step of a run that was never killed.
"""

import itertools
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import nn

from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.manifest import MANIFEST_NAME, checkpoint_dir
from trainer.checkpoints.state import TrainState
from trainer.config.model import OptimizerConfig
from trainer.config.trainer import CheckpointConfig
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks
from trainer.step.report import TrainProgress

WIDTH = 512
"""A checkpoint of some megabytes, so that a save takes long enough to be cut anywhere."""
BEGIN, END = "begin", "end"
CHILD_TIMEOUT_S = 120.0


class Trainee(TrainState):
    """A model, its optimizer, and dropout, so that the random state matters, too."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        super().__init__(model, make_optimizer(model, OptimizerConfig(lr=1e-3)))

    def step(self) -> None:
        """One optimizer step on noise."""
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of weights, moments and random state."""
        state = xxhash.xxh3_128(torch.get_rng_state().numpy().tobytes())
        moments = [value for entry in self.optimizer.state.values() for _, value in sorted(entry.items())]
        for tensor in [*self.model.state_dict().values(), *moments]:
            state.update(tensor.detach().numpy().tobytes())
        return state.hexdigest()


def lines(descriptor: int) -> Iterator[str]:
    """Whole lines from a pipe, to its end. `AssertionError` if it is silent for too long."""
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], CHILD_TIMEOUT_S)
        assert ready, f"the child said nothing for {CHILD_TIMEOUT_S:g} s"
        data = os.read(descriptor, 65536)
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)
        if not data:
            os.close(descriptor)
            return


@dataclass
class SaveKills:
    """A run below `root` that is killed again and again. `model_path` is a Hugging Face folder."""

    root: Path
    model_path: Path
    rng: random.Random
    background: bool = False
    """Whether saves go on while training does."""
    hits: Counter[str] = field(default_factory=Counter)
    """What the save had written when it was killed, and how often."""
    num_resumed: int = 0
    """Kills after which a valid checkpoint was found, none lost, with the state it should have."""
    save_s: float = 0.1
    """How long a save takes: the last one that was watched."""
    _committed: int = 0
    _begun: int = 0
    _begun_at: float = 0.0
    _digests: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # a fork has no use for a pool of threads that stayed in its parent

    def kill_once(self, last_seen: str | None = None) -> None:
        """Start the child, kill it in a save, resume. `AssertionError` if what it finds is not right. `last_seen`: kill
        it when the save has written this file."""
        child, pipe = self._spawn()
        news = lines(pipe)
        try:
            self._watch(news, num_saves=self.rng.randint(1, 3))
            if last_seen is None:
                time.sleep(self.rng.uniform(0.0, 1.1 * self.save_s))  # not a wait: the instant is what is under test
            else:
                self._await(last_seen)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for line in news:
            self._heard(line)
        self.hits[self._phase()] += 1
        self._resume()
        self.num_resumed += 1

    def _spawn(self) -> tuple[int, int]:
        receiver, sender = os.pipe()
        child = os.fork()
        if child:
            os.close(sender)
            return child, receiver
        try:
            os.close(receiver)
            self._train(sender)
        finally:
            os._exit(1)

    def _train(self, sender: int) -> None:
        trainee, checkpoints = Trainee(seed=0), self._checkpoints()
        progress = checkpoints.resume(trainee)
        for step in itertools.count(progress.step + 1):
            trainee.step()
            if (saved := checkpoints.saved(wait=True)) is not None:
                os.write(sender, f"{END} {saved}\n".encode())
            os.write(sender, f"{BEGIN} {step}\n".encode())
            checkpoints.begin(trainee, TrainProgress(step=step))
            if not self.background and checkpoints.saved(wait=True) is not None:
                os.write(sender, f"{END} {step}\n".encode())

    def _watch(self, news: Iterator[str], num_saves: int) -> None:
        """Follow the child to the begin of its `num_saves`-th save, but let the run complete one first."""
        for line in news:
            started = time.monotonic()
            self._heard(line)
            if line.startswith(BEGIN):
                num_saves -= 1
                self._begun_at = started
                if num_saves <= 0 and self._committed:
                    return
            else:
                self.save_s = started - self._begun_at
        raise AssertionError("the child ended by itself")

    def _await(self, name: str) -> None:
        """Until the save that has begun has written `name`, or is so far that a later one has begun."""
        path, next_folder = (checkpoint_dir(self.root, self._begun + ahead) for ahead in (0, 1))
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while not (path / name).exists() and not next_folder.exists():
            assert time.monotonic() < deadline, f"no {name} after {CHILD_TIMEOUT_S:g} s"
            time.sleep(0.001)  # finer than `until` of the other tests: a phase lasts milliseconds

    def _heard(self, line: str) -> None:
        what, step = line.split()
        if what == BEGIN:
            self._begun = int(step)
        else:
            self._committed = int(step)

    def _phase(self) -> str:
        """How far the last save came."""
        folder = checkpoint_dir(self.root, self._begun)
        if self._committed == self._begun:
            return "after the save"
        if (folder / MANIFEST_NAME).exists():
            return "manifest written"
        if any(path.name.startswith(f".{MANIFEST_NAME}") for path in folder.glob(".*")):
            return "writing the manifest"
        if any(folder.glob("*.safetensors")):
            return "writing or hashing tensors"
        return "making the folder" if folder.exists() else "before the first byte"

    def _resume(self) -> None:
        trainee = Trainee(seed=1)
        step = self._checkpoints().resume(trainee).step
        assert self._committed <= step <= self._begun, f"resumed at {step} of {self._committed} to {self._begun}"
        assert trainee.digest() == self._expected(step), f"the state of step {step} is not that of a run without kills"
        self._committed = step

    def _expected(self, step: int) -> str:
        """Digest after `step` of a run without kills. The first call trains it up to there, and keeps all digests."""
        if step not in self._digests:
            trainee = Trainee(seed=0)
            for number in range(1, step + 100):
                trainee.step()
                self._digests[number] = trainee.digest()
        return self._digests[step]

    def _checkpoints(self) -> Checkpoints:
        origin = Origin("kills", "digest", self.model_path)
        config = CheckpointConfig(background=self.background)
        return Checkpoints(self.root, origin, config, Ranks(0, 1, torch.device("cpu")))
