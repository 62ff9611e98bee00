"""What the Makefile names exists, and its version of torch is that of the project."""

import re

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
