"""Numbers of `/health` are gauges of `/metrics`."""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from runtime.health.health import Health
from runtime.health.server import HealthGauges


def page(health: Health, registry: CollectorRegistry) -> str:
    registry.register(HealthGauges(health))
    return generate_latest(registry).decode()


def test_numbers_are_gauges_and_words_are_not() -> None:
    now = [10.0]
    health = Health("orchestrator", stall_timeout_s=60, clock=lambda: now[0])
    health.progress(backlog=24, trainer="connected")
    now[0] = 12.5
    text = page(health, CollectorRegistry())
    assert "tandem_orchestrator_progress_age_s 2.5\n" in text
    assert "tandem_orchestrator_now_backlog 24.0\n" in text
    assert "connected" not in text


def test_gauges_are_measured_when_asked_and_may_appear_later() -> None:
    health, registry = Health("trainer", stall_timeout_s=60), CollectorRegistry()
    assert "now_step" not in page(health, registry)
    health.progress(step=3)
    assert "tandem_trainer_now_step 3.0\n" in generate_latest(registry).decode()


def test_metric_of_the_same_name_is_no_clash() -> None:
    health, registry = Health("trainer", stall_timeout_s=60), CollectorRegistry()
    health.progress(step=3)
    registry.register(HealthGauges(health))
    Gauge("tandem_trainer_step", "newest step", registry=registry).set(2)
    text = generate_latest(registry).decode()
    assert "tandem_trainer_step 2.0\n" in text
    assert "tandem_trainer_now_step 3.0\n" in text


def test_odd_names_become_names_that_prometheus_allows() -> None:
    health = Health("trainer", stall_timeout_s=60)
    health.set_facts(**{"tokens/global": 5})
    assert "tandem_trainer_now_tokens_global 5.0\n" in page(health, CollectorRegistry())
