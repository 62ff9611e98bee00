"""Runs of the trainer: in this process, as a process, and under torchrun; and what they leave behind."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.cli import run
from transport.weights import version_dir

COMMON = ("--model.seq-len", "64", "--optimizer.lr", "1e-3", "--health.port", "0", "--no-metrics.tensorboard")
MODULE = (sys.executable, "-m", "trainer")


def arguments(model: Path, runs: Path, name: str, *flags: str) -> list[str]:
    """Command line of the trainer for run `name` below `runs`."""
    return ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, *COMMON, *flags]


def replay(model: Path, recording: Path, runs: Path, name: str, *flags: str) -> Path:
    """Replay in this process; the run directory."""
    code = run(arguments(model, runs, name, "--replay", str(recording), *flags))
    assert code == 0
    return runs / name


def environment() -> dict[str, str]:
    """One thread per process, and none of the variables that name ranks."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}


def start(*arguments: str) -> "subprocess.Popen[str]":
    """A process of its own session, output captured."""
    return subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def torchrun(num_ranks: int, *arguments: str) -> tuple[str, ...]:
    """Command line that starts `num_ranks` trainers."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return (*launcher, "-m", "trainer", *arguments)


def finish(process: "subprocess.Popen[str]", within_s: float = 60.0) -> str:
    """Output of a process that must end with exit code 0."""
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode == 0, output
    return output


def weights_of(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    """Tensors of a publish."""
    folder = version_dir(run_dir / "weights", version)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def weight_bytes(run_dir: Path, version: int) -> bytes:
    """The safetensors files of a publish, end to end."""
    folder = version_dir(run_dir / "weights", version)
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
