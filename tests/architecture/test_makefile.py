"""What the Makefile names exists, and its version of torch is that of the project."""

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
