"""A tiny model with a warm start, made once; how `rl` is run with vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.circle import ROOT, environment

FLAGS = ("--inference.engine", "vllm")
"""All that differs from a run with the embedded engine."""


@pytest.fixture(scope="session")
def copy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that copies five letters rightly about one time in five."""
    folder = tmp_path_factory.mktemp("models") / "copy-text"
    command = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.2", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    return folder
