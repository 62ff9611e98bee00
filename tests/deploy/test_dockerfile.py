"""docker/Dockerfile: lint, what it copies, who runs, which ports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.commands import ROOT
from tests.deploy.test_compose import SERVICES, config_of

DOCKERFILE = ROOT / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()
TARGETS = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.M | re.S))


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists_and_is_let_through() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [word for line in re.findall(r"^COPY (.*)$", TEXT, re.M) for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore


def test_every_package_is_in_the_image() -> None:
    patterns = re.search(r"^include = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert patterns is not None
    for package in re.findall(r'"(\w+)\*"', patterns[1]):
        assert f"COPY {package} {package}" in TEXT


@pytest.mark.parametrize("target", ["orchestrator", "trainer", "inference"])
def test_service_does_not_run_as_root(target: str) -> None:
    assert re.findall(r"^USER (.*)$", TARGETS[target], re.M) == ["10001"]
    assert f'ENTRYPOINT ["{target}"]' in TARGETS[target]


def test_orchestrator_has_no_torch() -> None:
    assert "torch" not in TARGETS["orchestrator"]
    assert "FROM base AS orchestrator" in TEXT


@pytest.mark.parametrize("target", ["orchestrator", "trainer", "inference"])
def test_ports_are_those_of_the_config(target: str) -> None:
    config = config_of(target)
    ports = {int(port) for line in re.findall(r"^EXPOSE (.*)$", TARGETS[target], re.M) for port in line.split()}
    own = {
        "orchestrator": lambda: int(config["server"]["endpoint"].rsplit(":", 1)[1]),
        "trainer": lambda: config["weights"]["port"],
        "inference": lambda: config["server"]["port"],
    }[target]()
    assert ports == {own, config["health"]["port"]}


def test_compose_builds_only_targets_that_exist() -> None:
    builds = [service["build"] for service in SERVICES.values() if "build" in service]
    assert {build["target"] for build in builds} == {"orchestrator", "trainer", "inference"}
    arguments = set(re.findall(r"^ARG (\w+)", TEXT, re.M))
    assert all(set(build.get("args", {})) <= arguments for build in builds)


def test_version_of_torch_is_that_of_the_project() -> None:
    (version,) = set(re.findall(r"torch==(\S+)", TEXT))
    assert f'"torch=={version}"' in (ROOT / "pyproject.toml").read_text()
