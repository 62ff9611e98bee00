"""Learning from a teacher, as a user starts it: a second inference server, and `rl` with `opd` or `sft`."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.circle import ROOT, environment, run_rl
from tests.support.process import Process, service

pytestmark = pytest.mark.integration
START_TIMEOUT_S = 120.0
SIZE = ("--orchestrator.batch-size", "64")


@pytest.fixture(scope="module")
def teacher_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model that copies rightly nine times in ten."""
    folder = tmp_path_factory.mktemp("teacher")
    model = folder / "model"
    make = [sys.executable, "-m", "tiny_models", "--task", "copy-text", "--warm-start", "0.9", "--seed", "7"]
    subprocess.run([*make, "--out", str(model)], cwd=ROOT, env=environment(), check=True, timeout=240)
    serve = ["inference", "--model.path", str(model), "--server.port", "0", "--torch.max-model-len", "64"]
    serve += ["--run.dir", str(folder), "--run.name", "teacher"]
    with service("inference", folder / "teacher", *serve, warm=True) as teacher:
        teacher.until(lambda: "inference" in teacher.run_dir.read_services(), START_TIMEOUT_S)
        yield teacher.run_dir.read_services()["inference"].addresses["http"]


def overlay(folder: Path, url: str, algorithm: str, at: str = "orchestrator.") -> str:
    """A file with a teacher and an environment, for a config that has the keys of the orchestrator `at`."""
    path = folder / "overlay.toml"
    path.write_text(
        f"""
        [{at}teachers.big]
        url = "{url}"
        start_timeout_s = 2.0
        [[{at}envs]]
        id = "copy-text"
        group_size = 1
        sampling = {{ temperature = 1.0, max_tokens = 8 }}
        algorithm = {{ type = "{algorithm}", teacher = "big" }}
        """
    )
    return str(path)


def test_distillation_brings_the_policy_nearer_to_its_teacher(
    tmp_path: Path, copy_model: Path, teacher_url: str
) -> None:
    run = run_rl(tmp_path, copy_model, "@", overlay(tmp_path, teacher_url, "opd"), *SIZE, "--max-steps", "20")
    assert run.exit_code == 0, run.output
    distances = run.column("trainer", "loss/ref_kl")
    assert statistics.mean(distances[-4:]) < 0.8 * statistics.mean(distances[:4])
    assert all("loss/rl" not in row for row in run.metrics("trainer"))


def test_imitation_makes_the_teachers_words_likelier(tmp_path: Path, copy_model: Path, teacher_url: str) -> None:
    run = run_rl(tmp_path, copy_model, "@", overlay(tmp_path, teacher_url, "sft"), *SIZE, "--max-steps", "15")
    assert run.exit_code == 0, run.output
    losses = run.column("trainer", "loss/ce")
    assert statistics.mean(losses[-4:]) < 0.8 * statistics.mean(losses[:4])
    assert not any(key.startswith("mismatch_kl") for row in run.metrics("trainer") for key in row)
    assert statistics.mean(run.column("orchestrator", "reward/all/mean")) > 0.7, "the teacher played"


def test_a_run_without_its_teacher_ends_with_its_url(
    tmp_path: Path, copy_model: Path, start: Callable[..., Process]
) -> None:
    flags = ("--engines.backend", "scripted", "--model.path", str(copy_model), "--run.dir", str(tmp_path / "runs"))
    nobody = overlay(tmp_path, "http://127.0.0.1:9", "opd", at="")
    config = str(ROOT / "configs" / "copy_text" / "orchestrator.toml")
    orchestrator = start("orchestrator", "@", config, "@", nobody, *flags, "--health.port", "0", warm=True)
    assert orchestrator.wait() == 76, orchestrator.output
    assert "teacher 'big' at http://127.0.0.1:9 is not ready" in orchestrator.output
