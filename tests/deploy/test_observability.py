"""Prometheus and Grafana: they scrape what is served, and name only metrics that a run really has."""

import json
import re
from functools import cache

import pytest
import yaml

from tests.deploy.commands import ROOT
from tests.deploy.test_compose import OURS, config_of

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


def used_metrics() -> list[str]:
    """Names of ours in alerts and panels."""
    expressions = [rule["expr"] for rule in ALERTS]
    expressions += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return sorted({name for text in expressions for name in re.findall(r"tandem_\w+", text)})


@cache
def recorded_metrics() -> frozenset[str]:
    """Names that a run had (`tests/deploy/recorded_metrics.txt`, which tests/integration/test_circle.py compares)."""
    return frozenset((ROOT / "tests" / "deploy" / "recorded_metrics.txt").read_text().split())


@pytest.mark.parametrize("name", used_metrics())
def test_metric_exists_in_a_real_run(name: str) -> None:
    assert name in recorded_metrics()
