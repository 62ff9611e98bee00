"""Kubernetes, Slurm and SkyPilot examples: schemas, and every command line through the real CLIs."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.commands import ROOT, resolve

MANIFESTS = [m for m in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "tandem.yaml").read_text()) if m]
WORKLOADS = {m["metadata"]["name"]: m for m in MANIFESTS if m["kind"] in ("Deployment", "StatefulSet")}
SERVICES = {m["metadata"]["name"]: m for m in MANIFESTS if m["kind"] == "Service"}
SLURM = ROOT / "deploy" / "slurm" / "tandem.sbatch"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}/{m['metadata']['name']}")
def test_manifest_fits_the_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS[name]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    found = {}
    for name in WORKLOADS:
        (container,) = pod(name)["containers"]
        found[name] = resolve([*container.get("command", [name]), *container["args"]])
    return found


def test_probes_and_ports_are_those_of_the_services(configs: dict[str, dict[str, Any]]) -> None:
    assert WORKLOADS.keys() == {"inference", "orchestrator", "trainer"}
    for name, config in configs.items():
        (container,) = pod(name)["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        assert ports == {port["port"] for port in SERVICES[name]["spec"]["ports"]}
        for kind, path in (("startupProbe", "/ready"), ("livenessProbe", "/live")):
            assert container[kind]["httpGet"] == {"path": path, "port": config["health"]["port"]}
        assert config["health"]["port"] in ports
        assert config["health"]["host"] == "0.0.0.0"


def test_addresses_lead_to_the_services(configs: dict[str, dict[str, Any]]) -> None:
    assert configs["orchestrator"]["engines"]["urls"] == [f"http://inference:{configs['inference']['server']['port']}"]
    assert configs["orchestrator"]["engines"]["resolve_dns"] is True, "a headless service is a pool of addresses"
    port = configs["orchestrator"]["server"]["endpoint"].rsplit(":", 1)[1]
    assert configs["trainer"]["orchestrator"]["endpoint"] == f"tcp://orchestrator:{port}"


def test_secrets_are_where_the_configs_look_for_them(configs: dict[str, dict[str, Any]]) -> None:
    for name, config in configs.items():
        (source,) = (volume["projected"]["sources"] for volume in pod(name)["volumes"] if volume["name"] == "mounted")
        files = {f"/run/secrets/{item['path']}" for s in source for item in s["secret"].get("items", [])}
        for table in ("server", "orchestrator", "weights"):
            folder = config.get(table, {}).get("keys_dir")
            assert folder is None or any(file.startswith(folder + "/") for file in files), (name, table)


def test_pods_do_not_run_as_root() -> None:
    assert all(pod(name)["securityContext"]["runAsNonRoot"] for name in WORKLOADS)


def recorded(tmp_path: Path) -> list[list[str]]:
    """What the script asks Slurm to run, on three nodes."""
    log = tmp_path / "log"
    # Each waits until all three are there: the script ends the others when the first one has ended.
    wait = f'for i in $(seq 600); do [ "$(wc -l < {log})" -ge 3 ] && break; sleep 0.1; done'
    srun = f'line=$(printf "%q " "$@"); printf "%s\\n" "$line" >> {log}; {wait}'
    stubs = {"scontrol": "printf 'a\\nb\\nc\\n'", "srun": srun}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "a,b,c"}
    subprocess.run(["bash", str(SLURM)], cwd=ROOT, env=environment, check=True, timeout=60)
    return [shlex.split(line) for line in log.read_text().splitlines()]


def test_slurm_script_starts_what_the_services_accept(tmp_path: Path) -> None:
    lines = {
        next(word for word in ("inference", "orchestrator", "torchrun") if word in line): line
        for line in recorded(tmp_path)
    }
    assert lines.keys() == {"inference", "orchestrator", "torchrun"}
    for service in ("inference", "orchestrator"):
        line = lines[service]
        assert line[line.index("--nodelist") + 1] == "a"
        resolve(line[line.index(service) :])
    line = lines["torchrun"]
    assert line[line.index("--nodelist") + 1] == "b,c"
    command = line[line.index("torchrun", line.index("-c") + 2) :]
    config = resolve([*command, "--weights.advertised-host", "b"])
    assert config["orchestrator"]["endpoint"] == "tcp://a:29600"


def test_skypilot_file_runs_what_the_services_accept() -> None:
    task = yaml.safe_load((ROOT / "deploy" / "skypilot.yaml").read_text())
    configs, gpus = {}, {}
    for line in task["run"].splitlines()[1:]:
        words = shlex.split(line.removesuffix(" &"))
        if words[0].startswith("CUDA_VISIBLE_DEVICES="):
            visible = words.pop(0).partition("=")[2]
            gpus[words[0]] = set(visible.split(","))
        configs["trainer" if words[0] == "torchrun" else words[0]] = resolve(words)
    assert {config["run"]["dir"] for config in configs.values()} == {"/runs"}
    assert configs.keys() == {"inference", "orchestrator", "trainer"}
    assert configs["inference"]["admin_token_file"] == configs["orchestrator"]["admin_token_file"]
    assert not gpus["inference"] & gpus["torchrun"], "engine and trainer must not share a GPU"
    assert "python3.11" in task["setup"]
