"""The whole circle as a user starts it: real processes, real sockets, the embedded engine, a tiny model."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RL_CONFIG = ROOT / "configs" / "copy_text" / "rl.toml"
VLLM_FLAGS = ("--inference.engine", "vllm")
"""All that differs from a run with the embedded engine."""
COLOUR_CONFIG = ROOT / "configs" / "colour_vlm" / "rl.toml"


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    path: Path
    exit_code: int
    output: str

    def metrics(self, service: str) -> list[dict[str, float]]:
        """One row per step, in order."""
        lines = (self.path / "metrics" / f"{service}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def column(self, service: str, name: str) -> list[float]:
        """One metric over all steps."""
        return [row[name] for row in self.metrics(service)]


def environment() -> dict[str, str]:
    """One thread per process: two cores are shared by all of them."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def make_copy_model(folder: Path) -> Path:
    """A model that copies five letters rightly about one time in five, in `folder`."""
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.2", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=280)
    return folder


def run_rl(
    folder: Path, model: Path, *flags: str, name: str = "circle", timeout_s: float = 280, config: Path = RL_CONFIG
) -> Finished:
    """Run `rl` on `config` to its end."""
    command = [sys.executable, "-m", "runtime", "@", str(config), "--run.dir", str(folder), "--run.name", name]
    command += ["--model.path", str(model), *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Finished(folder / name, done.returncode, done.stdout)
