"""Health: its states, the endpoint that shows them, and its numbers as gauges of `/metrics`."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from runtime.errors import UserError
from runtime.health.health import DeclaredWait, Health, Status, ask_health, read_waits
from runtime.health.server import HealthGauges, HealthServer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health("trainer", stall_timeout_s=10.0, clock=clock)


@pytest.fixture
def server(health: Health) -> Iterator[HealthServer]:
    server = HealthServer(health, host="127.0.0.1", port=0)
    yield server
    server.close()


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_states_follow_the_service(health: Health) -> None:
    assert health.status is Status.STARTING
    health.ready()
    assert health.status is Status.OK
    health.stopping()
    assert health.status is Status.STOPPING


def test_no_progress_is_a_stall_and_progress_ends_it(health: Health, clock: Clock) -> None:
    health.ready()
    clock.now += 10.5
    assert health.status is Status.STALLED
    assert health.progress_age_s == 10.5
    health.progress(step=7)
    assert health.status is Status.OK
    assert health.report()["step"] == 7


def test_start_that_never_ends_is_a_stall(health: Health, clock: Clock) -> None:
    clock.now += 11
    assert health.status is Status.STALLED


def test_waits_of_several_loops_are_named(health: Health) -> None:
    health.waiting_for("free slots", loop="scheduler")
    health.waiting_for("a group", loop="batcher")
    assert health.waits == "batcher: a group; scheduler: free slots"
    health.waiting_for("", loop="batcher")
    health.waiting_for("", loop="never waited")
    assert health.report()["waiting_for"] == "scheduler: free slots"


def test_waits_are_data_for_programs_and_a_sentence_for_people(health: Health) -> None:
    with health.waiting("batch 7", peer="orchestrator", detail="groups", loop="fetch"):
        report = json.loads(json.dumps(health.report()))
    assert report["waiting_for"] == "fetch: batch 7 (groups)"
    assert read_waits(report) == (DeclaredWait("batch 7", ("orchestrator",), "groups", "fetch"),)
    assert read_waits(health.report()) == ()


def test_wait_ends_with_its_block_even_by_an_error(health: Health) -> None:
    def block() -> None:
        with health.waiting("batch 7"):
            assert health.waits == "batch 7"
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert health.waits == ""


def test_facts_cannot_hide_the_fixed_keys(health: Health) -> None:
    health.set_facts(status="fine", version=3)
    report = health.report()
    assert (report["status"], report["version"]) == ("starting", 3)


def test_facts_are_not_progress(health: Health, clock: Clock) -> None:
    clock.now += 5
    health.set_facts(queue=1)
    assert health.progress_age_s == 5


def test_health_is_safe_to_use_from_many_threads(health: Health) -> None:
    def work(index: int) -> None:
        for step in range(200):
            health.progress(**{f"step{index}": step})
            health.waiting_for(str(step), loop=str(index))
            health.report()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {health.report()[f"step{index}"] for index in range(4)} == {199}


def test_endpoint_answers_503_until_ready_and_when_stalled(health: Health, clock: Clock, server: HealthServer) -> None:
    assert get(server.url)[0] == 503
    health.ready()
    health.waiting_for("batch 7")
    code, body = get(server.url)
    assert code == 200
    assert json.loads(body) == {
        "service": "trainer",
        "status": "ok",
        "progress_age_s": 0.0,
        "waiting_for": "batch 7",
        "waits": [{"what": "batch 7", "peers": [], "detail": "", "loop": ""}],
    }
    clock.now += 11
    code, body = get(server.url)
    assert (code, json.loads(body)["status"]) == (503, "stalled")
    health.stopping()
    assert get(server.url)[0] == 200


def test_fetch_reads_the_report_of_a_stalled_service_too(health: Health, clock: Clock, server: HealthServer) -> None:
    clock.now += 11
    assert ask_health(server.url)[0]["status"] == "stalled"


def test_what_is_no_report_is_said(server: HealthServer) -> None:
    url = server.url.replace("/health", "/metrics")
    assert ask_health(url) == ({}, f"{url} answers with something else than a report")


def test_fetch_of_a_dead_service_is_empty(server: HealthServer) -> None:
    server.close()
    assert ask_health(server.url, timeout_s=1.0)[0] == {}


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_fetch_of_a_service_that_dies_while_it_answers_is_empty(status: str) -> None:
    """The thread that polls all services must outlive each of them."""

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 100\r\n\r\n{{".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        assert ask_health(url, timeout_s=30.0)[0] == {}
        thread.join(30)


def test_answer_that_is_nested_without_end_is_no_report() -> None:
    """Whoever has the port of a service by now must not end those who look after it."""
    body = b"[" * 200_000

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        assert ask_health(url, 30.0) == ({}, f"{url} answers with something else than a report")
        thread.join(30)


def test_metrics_are_in_prometheus_text(health: Health, clock: Clock) -> None:
    registry = CollectorRegistry()
    Gauge("my_gauge", "mine", registry=registry).set(4)
    server = HealthServer(health, host="127.0.0.1", port=0, registry=registry)
    try:
        clock.now += 2
        text = get(server.url.replace("/health", "/metrics"))[1].decode()
        assert "my_gauge 4.0" in text
        assert "tandem_trainer_progress_age_s 2.0" in text
        assert "process_resident_memory_bytes" in text
    finally:
        server.close()


def test_other_paths_are_404(server: HealthServer) -> None:
    assert get(server.url.replace("/health", "/"))[0] == 404


def test_port_in_use_is_a_user_error(server: HealthServer, health: Health) -> None:
    with pytest.raises(UserError, match=rf"cannot bind health endpoint 127.0.0.1:{server.port}.*--health.port"):
        HealthServer(health, host="127.0.0.1", port=server.port)


def test_unknown_host_is_a_user_error(health: Health) -> None:
    with pytest.raises(UserError, match="cannot bind health endpoint"):
        HealthServer(health, host="no.such.host.invalid", port=0)


def test_closed_port_can_be_bound_again(health: Health, server: HealthServer) -> None:
    server.close()
    again = HealthServer(Health("trainer", 1.0), host="127.0.0.1", port=server.port)
    again.close()
    assert again.port == server.port


def test_silent_client_does_not_block_others(health: Health, server: HealthServer) -> None:
    health.ready()
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.url)[0] == 200


def test_probes_tell_live_from_ready(health: Health, clock: Clock, server: HealthServer) -> None:
    base = server.url.removesuffix("/health")

    def probes() -> tuple[int, int]:
        return get(f"{base}/live")[0], get(f"{base}/ready")[0]

    assert probes() == (200, 503), "a service that loads must not be restarted, and gets no work"
    health.ready()
    assert probes() == (200, 200)
    clock.now += 11
    assert probes() == (503, 503), "a service that stands still is to be restarted"
    health.stopping()
    assert probes() == (200, 503), "a service that ends is left alone, and gets no work"


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
