"""Runs of the trainer: command lines, replays in this process, and what they leave behind."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.cli import run
from transport.wire.weights import version_dir

COMMON = ("--model.seq-len", "64", "--optimizer.lr", "1e-3", "--health.port", "0", "--no-metrics.tensorboard")


def arguments(model: Path, runs: Path, name: str, *flags: str) -> list[str]:
    """Command line of the trainer for run `name` below `runs`."""
    return ["--model.path", str(model), "--run.dir", str(runs), "--run.name", name, *COMMON, *flags]


def replay(model: Path, recording: Path, runs: Path, name: str, *flags: str) -> Path:
    """Replay in this process; the run directory."""
    code = run(arguments(model, runs, name, "--replay", str(recording), *flags))
    assert code == 0
    return runs / name


def torchrun(num_ranks: int, *arguments: str) -> tuple[str, ...]:
    """Words of the module that starts `num_ranks` processes of what `arguments` name."""
    return ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *arguments)


def weights_of(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    """Tensors of a publish."""
    folder = version_dir(run_dir / "weights", version)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def weight_bytes(run_dir: Path, version: int) -> bytes:
    """The safetensors files of a publish, end to end."""
    folder = version_dir(run_dir / "weights", version)
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
