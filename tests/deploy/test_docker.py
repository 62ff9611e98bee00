"""docker-compose.yml against what the services really use: commands, ports, probes, secrets, volumes, variables.

No Docker runs here: the file is read, and every command line goes through the real CLI.

docker/Dockerfile: lint, what it copies, who runs, which ports.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.cli.console import Resolved
from tests.deploy.commands import ROOT, resolve, substitute, variables

COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()

ENV = (ROOT / ".env.example").read_text()

COMPOSE: dict[str, Any] = yaml.safe_load(substitute(COMPOSE_TEXT, {}))

SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]

OURS = {name: kind for name in SERVICES for kind in ("inference", "orchestrator", "trainer") if kind in name.split("-")}

PROFILES = {"gpu", "cpu-demo", "observability", "inference-node", "orchestrator-node", "trainer-node"}


@cache
def config_of(name: str) -> Resolved:
    service = SERVICES[name]
    return resolve([*service.get("entrypoint", [OURS[name]]), *service["command"]])


def test_profiles_are_those_that_are_documented() -> None:
    assert {profile for service in SERVICES.values() for profile in service["profiles"]} == PROFILES
    assert all(f"--profile {profile}" in COMPOSE_TEXT.partition("\nname:")[0] for profile in PROFILES)


@pytest.mark.parametrize("name", OURS)
def test_command_line_is_accepted_by_the_real_cli(name: str) -> None:
    assert config_of(name)["run"]["name"]


@pytest.mark.parametrize("name", OURS)
def test_probe_asks_a_route_that_the_service_has(name: str) -> None:
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[:4] == ["CMD", "python", "-m", "runtime.probe"]
    url = urlsplit(test[4])
    assert (url.hostname, url.port) == ("127.0.0.1", config_of(name)["health"]["port"])
    assert url.path in ("/live", "/ready")
    assert SERVICES[name]["healthcheck"]["start_period"]


@pytest.mark.parametrize("name", OURS)
def test_folders_that_the_service_uses_are_mounted(name: str) -> None:
    mounts = {parts[1]: parts[2:] for parts in (volume.split(":") for volume in SERVICES[name]["volumes"])}
    config = config_of(name)
    assert mounts[f"/{config['run']['dir'].split('/')[1]}"] == [], "the run directory must be writable"
    assert mounts[f"/{config['model']['path'].split('/')[1]}"] == ["ro"]


NEEDED = {
    ("orchestrator", "server"): {"server.secret", "server.public", "client.public"},
    ("trainer", "orchestrator"): {"client.secret", "client.public", "server.public"},
    ("trainer", "weights"): {"server.secret", "server.public", "client.public"},
    ("inference", "weights"): {"client.secret", "client.public", "server.public"},
}
"""Files of a key folder, by service and the table of its config that names the folder."""


@pytest.mark.parametrize("name", [name for name in OURS if not name.startswith("demo")])
def test_service_has_exactly_the_secrets_that_it_reads(name: str) -> None:
    config, kind = config_of(name), OURS[name]
    wanted = {
        f"{config[table]['keys_dir']}/{file}" for (k, table), files in NEEDED.items() if k == kind for file in files
    }
    wanted |= {config["admin_token_file"]} if config.get("admin_token_file") else set()
    mounted = {
        f"/run/secrets/{entry}" if isinstance(entry, str) else entry["target"] for entry in SERVICES[name]["secrets"]
    }
    assert mounted == wanted
    sources = {entry if isinstance(entry, str) else entry["source"] for entry in SERVICES[name]["secrets"]}
    assert sources <= COMPOSE["secrets"].keys()


@pytest.mark.parametrize(("name", "peer"), [("orchestrator", "inference"), ("demo-orchestrator", "demo-inference")])
def test_orchestrator_asks_the_engine_where_it_listens(name: str, peer: str) -> None:
    (url,) = config_of(name)["engines"]["urls"]
    server = config_of(peer)["server"]
    assert url == f"http://{peer}:{server['port']}"
    assert server["host"] == "0.0.0.0"


@pytest.mark.parametrize(("name", "peer"), [("trainer", "orchestrator"), ("demo-trainer", "demo-orchestrator")])
def test_trainer_asks_the_orchestrator_where_it_listens(name: str, peer: str) -> None:
    bound = config_of(peer)["server"]["endpoint"]
    assert config_of(name)["orchestrator"]["endpoint"] == bound.replace("0.0.0.0", peer)


def test_weights_need_no_disk_that_trainer_and_engines_share() -> None:
    def writable(name: str) -> set[str]:
        return {volume.split(":")[0] for volume in SERVICES[name]["volumes"] if not volume.endswith(":ro")}

    assert config_of("trainer")["weights"]["channel"] == "zmq"
    assert not writable("trainer") & writable("inference")


@pytest.mark.parametrize("name", OURS)
def test_dependencies_can_become_healthy(name: str) -> None:
    for peer, rule in SERVICES[name].get("depends_on", {}).items():
        if rule["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[peer]
        assert set(SERVICES[peer]["profiles"]) & set(SERVICES[name]["profiles"])


@pytest.mark.parametrize("name", OURS)
def test_service_gets_longer_to_end_than_it_takes(name: str) -> None:
    service, config = SERVICES[name], config_of(name)
    grace_s = int(service.get("stop_grace_period", "10s").removesuffix("s"))
    assert grace_s >= config["server"].get("grace_s", 0) if "server" in config else grace_s > 0


@pytest.mark.parametrize("name", OURS)
def test_service_runs_with_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["restart"].startswith("on-failure")
    assert "ports" not in service, "nothing of ours is published beyond its network"


@pytest.mark.parametrize("name", ["trainer", "trainer-node"])
def test_trainer_machine_that_died_can_join_again(name: str) -> None:
    assert SERVICES[name]["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_networks_of_the_services_have_no_way_out() -> None:
    used = {network for name in OURS for network in SERVICES[name].get("networks", [])}
    assert used == {"internal", "demo"}
    assert all(COMPOSE["networks"][network] == {"internal": True} for network in used)
    assert SERVICES["grafana"]["ports"] == ["127.0.0.1:3000:3000"]


def test_demo_model_is_the_one_that_the_demo_trains() -> None:
    words = SERVICES["demo-model"]["command"]
    assert words[words.index("--out") + 1] == config_of("demo-trainer")["model"]["path"]


def test_engine_and_trainer_of_one_machine_have_gpus_of_their_own() -> None:
    engine, trainer = (SERVICES[name]["environment"]["CUDA_VISIBLE_DEVICES"] for name in ("inference", "trainer"))
    assert not set(engine.split(",")) & set(trainer.split(","))


@pytest.mark.parametrize("name", ["inference", "trainer"])
def test_gpu_services_reserve_gpus_and_shared_memory(name: str) -> None:
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert SERVICES[name]["shm_size"]


def test_every_variable_is_explained_and_every_explained_one_is_used() -> None:
    explained = set(re.findall(r"^([A-Z_]+)=", ENV, flags=re.MULTILINE))
    assert explained == variables(COMPOSE_TEXT)


def test_defaults_of_variables_agree_with_the_example() -> None:
    values = dict(re.findall(r"^([A-Z_]+)=(.*)$", ENV, flags=re.MULTILINE))
    assert yaml.safe_load(substitute(COMPOSE_TEXT, values)) == COMPOSE


def test_named_volumes_are_declared() -> None:
    named = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {name for name in named if not name.startswith(".")} == COMPOSE["volumes"].keys()


DOCKERFILE = ROOT / "docker" / "Dockerfile"

DOCKERFILE_TEXT = DOCKERFILE.read_text()

TARGETS = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE_TEXT, re.M | re.S))


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists_and_is_let_through() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE_TEXT, re.M) for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignore


def test_every_package_is_in_the_image() -> None:
    patterns = re.search(r"^include = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert patterns is not None
    for package in re.findall(r'"(\w+)\*"', patterns[1]):
        assert f"COPY {package} {package}" in DOCKERFILE_TEXT


@pytest.mark.parametrize("target", ["orchestrator", "trainer", "inference"])
def test_service_does_not_run_as_root(target: str) -> None:
    assert re.findall(r"^USER (.*)$", TARGETS[target], re.M) == ["10001"]
    assert f'ENTRYPOINT ["{target}"]' in TARGETS[target]


def test_orchestrator_has_no_torch() -> None:
    assert "torch" not in TARGETS["orchestrator"]
    assert "FROM base AS orchestrator" in DOCKERFILE_TEXT


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
    arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE_TEXT, re.M))
    assert all(set(build.get("args", {})) <= arguments for build in builds)


def test_version_of_torch_is_that_of_the_project() -> None:
    (version,) = set(re.findall(r"torch==(\S+)", DOCKERFILE_TEXT))
    assert f'"torch=={version}"' in (ROOT / "pyproject.toml").read_text()
