"""The doctor's conclusion is a pure function of the evidence."""

from typing import Any

import pytest

from runtime.doctor.diagnosis import Condition, diagnose, find_condition, find_waits
from runtime.doctor.evidence import Evidence, Life, ServiceEvidence


def service(name: str, waiting_for: str = "", *, life: Life = Life.RUNNING, **fields: Any) -> ServiceEvidence:
    """A service that answers, unless `health` says otherwise."""
    health = {"service": name, "status": "ok", "progress_age_s": 0.2, "waiting_for": waiting_for}
    return ServiceEvidence(**({"name": name, "life": life, "pid": 7, "host": "here", "health": health} | fields))


def dead(name: str, **fields: Any) -> ServiceEvidence:
    return service(name, life=Life.GONE, **({"health": {}} | fields))


def run(*services: ServiceEvidence) -> Evidence:
    return Evidence("runs/x", services, {})


TRAINER = service("trainer", "batch 12 from the orchestrator (scheduler: an engine to come back)")
ENGINE = "scheduler: an engine to come back (http://127.0.0.1:8000/generate did not answer: refused)"


def test_chain_from_the_trainer_to_a_dead_engine_is_one_sentence() -> None:
    inference = dead("inference", addresses=("127.0.0.1:8000",), ended="exit 1: the engine died: OOM")
    diagnosis = diagnose(run(inference, service("orchestrator", ENGINE), TRAINER))
    assert diagnosis.culprit == "inference"
    assert diagnosis.conclusion == (
        "trainer waits for batch 12 from the orchestrator (scheduler: an engine to come back); "
        f"orchestrator waits for {ENGINE}; "
        "inference is dead (exit 1: the engine died: OOM)"
    )
    assert [(wait.waiter, wait.peers) for wait in diagnosis.waits] == [
        ("orchestrator", ("inference",)),
        ("trainer", ("orchestrator",)),
    ]


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        ("policy version 3 from the trainer (2 is live)", [("trainer",)]),
        ("batcher: groups for batch 4; scheduler: policy version 3 from the trainer", [(), ("trainer",)]),
        ("the engines http://127.0.0.1:8000, http://10.0.0.1:8000", [("inference",)]),
        ("the port 127.0.0.1:80001", [()]),
        ("the trainers", [()]),
        ("trainer-1 to come back", [("trainer-1",)]),
        ("a slot (as the trainer; the orchestrator) of its own", [("trainer",)]),
        ("an open parenthesis (with the trainer", [("trainer",)]),
        ("", []),
    ],
)
def test_peers_are_recognized_by_name_or_address(text: str, peers: list[tuple[str, ...]]) -> None:
    others = [
        service("inference", addresses=("127.0.0.1:8000",)),
        service("orchestrator"),
        service("trainer", addresses=("127.0.0.1:9102",)),
        service("trainer-1"),
    ]
    assert [wait.peers for wait in find_waits(service("orchestrator", text), others)] == peers


@pytest.mark.parametrize(
    ("evidence", "condition"),
    [
        (service("a"), Condition.WORKING),
        (service("a", "something"), Condition.WAITING),
        (service("a", health={"status": "loading"}), Condition.STARTING),
        (service("a", health={}), Condition.STARTING),
        (service("a", health={"status": "stalled"}), Condition.STALLED),
        (service("a", health={}, problem="http://x: no answer in time"), Condition.SILENT),
        (service("a", life=Life.FROZEN, health={}, problem="no answer"), Condition.FROZEN),
        (service("a", life=Life.UNKNOWN), Condition.WORKING),
        (service("a", life=Life.UNKNOWN, health={}), Condition.DEAD),
        (dead("a"), Condition.DEAD),
        (dead("a", ended="exit 76: lost the orchestrator"), Condition.DEAD),
        (dead("a", ended="exit 0"), Condition.ENDED),
    ],
)
def test_condition_of_one_service(evidence: ServiceEvidence, condition: Condition) -> None:
    assert find_condition(evidence) is condition


def test_frozen_service_is_named_with_the_command_that_thaws_it() -> None:
    frozen = service("trainer", life=Life.FROZEN, pid=12, health={})
    diagnosis = diagnose(run(service("orchestrator", "policy version 3 from the trainer"), frozen))
    assert diagnosis.culprit == "trainer"
    assert diagnosis.conclusion == (
        "orchestrator waits for policy version 3 from the trainer; "
        "trainer is frozen (pid 12 got SIGSTOP: kill -CONT 12)"
    )


def test_killed_service_is_described_by_the_worst_of_its_last_lines() -> None:
    lines = ("10:00 CRITICAL trainer stalled: no progress", "10:00 INFO goodbye")
    assert diagnose(run(dead("trainer", last_lines=lines))).conclusion == (
        "trainer is dead (it left no word; last line of its log: 10:00 CRITICAL trainer stalled: no progress)"
    )
    assert "its log is empty" in diagnose(run(dead("trainer"))).conclusion


def test_launcher_saw_what_killed_a_service_that_left_no_word() -> None:
    launcher = dead("rl", ended="exit 137: inference was killed by SIGKILL; its output is in runs/x/logs/inference.out")
    diagnosis = diagnose(run(dead("inference"), launcher, dead("trainer", ended="exit 0")))
    assert diagnosis.conclusion == "trainer has ended (exit 0); inference is dead (it was killed by SIGKILL)"


def test_healthy_run_has_no_culprit() -> None:
    diagnosis = diagnose(run(service("inference"), service("orchestrator", "groups for batch 4"), TRAINER))
    assert diagnosis.culprit is None
    assert diagnosis.conclusion.endswith("orchestrator waits for groups for batch 4")
    assert "inference works" in diagnosis.conclusion


def test_long_wait_says_how_long() -> None:
    slow = service("orchestrator", health={"status": "ok", "progress_age_s": 300.0, "waiting_for": "the trainer"})
    assert diagnose(run(slow)).conclusion == "orchestrator waits for the trainer (no progress for 300 s)"


def test_two_that_wait_for_each_other_are_both_in_the_sentence() -> None:
    orchestrator = service("orchestrator", "policy version 3 from the trainer")
    diagnosis = diagnose(run(orchestrator, service("trainer", "batch 4 from the orchestrator")))
    assert diagnosis.conclusion.count(" waits for ") == 2
    assert diagnosis.culprit is None


def test_worst_service_is_the_culprit_even_if_nobody_waits_for_it() -> None:
    stalled = service("orchestrator", health={"status": "stalled", "progress_age_s": 901.0, "waiting_for": "x"})
    diagnosis = diagnose(run(stalled, dead("trainer-1", ended="exit 1: ValueError()")))
    assert diagnosis.culprit == "trainer-1"
    assert "orchestrator is stalled (no progress for 901 s), waiting for x" in diagnosis.conclusion


def test_of_two_dead_the_one_that_is_waited_for_is_the_culprit() -> None:
    others = [dead("inference", ended="exit 1: x"), dead("trainer", ended="exit 76: y")]
    assert diagnose(run(*others, service("orchestrator", "version 2 of the trainer"))).culprit == "trainer"
    assert diagnose(run(*others, service("orchestrator", "inference"))).culprit == "inference"


def test_stalled_service_blames_whom_it_waits_for() -> None:
    health = {"status": "stalled", "progress_age_s": 901.0, "waiting_for": "policy version 1 from the trainer"}
    stalled = service("orchestrator", health=health)
    diagnosis = diagnose(run(stalled, service("trainer", health={"status": "starting"})))
    assert diagnosis.culprit == "trainer"
    assert diagnosis.conclusion.endswith("; trainer is starting")
    health = {"status": "stalled", "progress_age_s": 901.0, "waiting_for": "batch 1 from the orchestrator"}
    assert diagnose(run(stalled, service("trainer", health=health))).culprit in ("orchestrator", "trainer")
    assert diagnose(run(stalled)).culprit == "orchestrator"


def test_launcher_is_no_part_of_the_chain() -> None:
    assert diagnose(run(dead("rl"))).conclusion == "no service was ever started in runs/x"


def test_services_that_wait_come_before_those_they_wait_for() -> None:
    names = ["inference", "orchestrator", "trainer"]
    diagnosis = diagnose(run(service(names[0]), service(names[1], "inference"), service(names[2], "orchestrator")))
    said = [part.split()[0] for part in diagnosis.conclusion.split("; ")]
    assert said == list(reversed(names))
