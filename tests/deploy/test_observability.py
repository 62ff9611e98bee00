"""Prometheus and Grafana: they scrape what is served, and name only metrics that a run really has."""

import json
import re

import yaml
from prometheus_client import generate_latest

from inference.server.routes import ServerMetrics
from runtime.health.health import Health
from runtime.health.server import HealthGauges
from tests.deploy.commands import ROOT
from tests.deploy.test_docker import OURS, config_of

PROMETHEUS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "tandem.json").read_text())


def test_targets_are_the_services_of_compose() -> None:
    for job in PROMETHEUS["scrape_configs"]:
        targets = {target for entry in job["static_configs"] for target in entry["targets"]}
        expected = {
            f"{name}:{config_of(name)['health']['port']}"
            for name, kind in OURS.items()
            if kind == job["job_name"] and not name.endswith("-node")
        }
        assert targets == expected


def test_panels_read_from_the_provisioned_source() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_every_alert_says_what_it_means() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) > 8
    for rule in ALERTS:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")


OF_A_STEP = r"^tandem_(trainer|orchestrator)_(?!now_|progress_age_s$)"
"""Metrics that come from a step; `tests/integration/test_circle.py` compares these with a real run's."""


def used_metrics() -> list[str]:
    """Names of ours in alerts and panels."""
    expressions = [rule["expr"] for rule in ALERTS]
    expressions += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return sorted({name for text in expressions for name in re.findall(r"tandem_\w+", text)})


def test_metrics_of_the_moment_are_facts_that_services_show() -> None:
    facts = (ROOT / "docs" / "operations.md").read_text()
    for name in used_metrics():
        fact = re.fullmatch(r"tandem_orchestrator_now_(\w+)", name)
        if fact is not None:
            shown = "rejected_*" if fact[1].startswith("rejected_") else fact[1]
            assert f"`{shown}`" in facts, f"{name} is not among the documented facts of /health"


def test_metrics_of_the_engine_are_served_by_it() -> None:
    """Both engines tell them as facts (`ServerState.note_progress`, `VllmSupervisor._watch`)."""
    metrics = ServerMetrics()
    health = Health("inference", stall_timeout_s=1)
    health.progress(version=1, running=0, waiting=0)
    metrics.registry.register(HealthGauges(health))
    served = generate_latest(metrics.registry).decode()
    for name in used_metrics():
        if name.startswith("tandem_inference_"):
            assert f"# TYPE {name} " in served or f"\n{name} " in served
