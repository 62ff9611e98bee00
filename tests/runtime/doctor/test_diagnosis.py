"""The doctor's conclusion is a pure function of the evidence.

How far the files of a run have come.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime.doctor
from runtime.doctor.diagnosis import Condition, diagnose, find_condition, find_waits
from runtime.doctor.evidence import TAIL_BYTES, Evidence, Life, ServiceEvidence, read_positions, read_tail
from runtime.health.health import DeclaredWait, Health
from runtime.run_dir.run_dir import RunDir


def wait(what: str, *peers: str, detail: str = "", loop: str = "") -> DeclaredWait:
    return DeclaredWait(what, peers, detail, loop)


def told(*waits: DeclaredWait, **fields: Any) -> dict[str, Any]:
    """A health report as it comes over HTTP."""
    health = Health("any", stall_timeout_s=60)
    for one in waits:
        health.waiting_for(one.what, peer=one.peers, detail=one.detail, loop=one.loop)
    report: dict[str, Any] = json.loads(json.dumps(health.report()))
    return report | {"status": "ok", "progress_age_s": 0.2} | fields


def service(name: str, *waits: DeclaredWait, life: Life = Life.RUNNING, **fields: Any) -> ServiceEvidence:
    """A service that answers, unless `health` says otherwise."""
    health = told(*waits, service=name)
    return ServiceEvidence(**({"name": name, "life": life, "pid": 7, "host": "here", "health": health} | fields))


def dead(name: str, **fields: Any) -> ServiceEvidence:
    return service(name, life=Life.GONE, **({"health": {}} | fields))


def run(*services: ServiceEvidence) -> Evidence:
    return Evidence("runs/x", services, {})


BATCH = wait("batch 12 from the orchestrator", "orchestrator", detail="scheduler: an engine to come back")

TRAINER = service("trainer", BATCH)

ENGINE = wait(
    "an engine to come back",
    "http://127.0.0.1:8000",
    detail="http://127.0.0.1:8000/generate did not answer: refused",
    loop="scheduler",
)

VERSION = wait("policy version 3 from the trainer", "trainer")


def test_chain_from_the_trainer_to_a_dead_engine_is_one_sentence() -> None:
    inference = dead("inference", addresses=("127.0.0.1:8000",), ended="exit 1: the engine died: OOM")
    diagnosis = diagnose(run(inference, service("orchestrator", ENGINE), TRAINER))
    assert diagnosis.culprit == "inference"
    assert diagnosis.conclusion == (
        "trainer waits for batch 12 from the orchestrator (scheduler: an engine to come back); "
        "orchestrator waits for scheduler: an engine to come back "
        "(http://127.0.0.1:8000/generate did not answer: refused); "
        "inference is dead (exit 1: the engine died: OOM)"
    )
    assert [(wait.waiter, wait.peers) for wait in diagnosis.waits] == [
        ("orchestrator", ("inference",)),
        ("trainer", ("orchestrator",)),
    ]


@pytest.mark.parametrize(
    ("waits", "peers"),
    [
        ([wait("policy version 3 from the trainer", "trainer", detail="2 is live")], [("trainer",)]),
        ([wait("groups for batch 4", loop="batcher"), wait("policy 3", "trainer", loop="z")], [(), ("trainer",)]),
        ([wait("the engines", "http://127.0.0.1:8000", "http://10.0.0.1:8000")], [("inference",)]),
        ([wait("the engines", "http://127.0.0.1:8000/", "127.0.0.1:9102")], [("inference", "trainer")]),
        ([wait("the port 127.0.0.1:80001", "http://127.0.0.1:80001")], [()]),
        ([wait("the trainers")], [()]),
        ([wait("trainer-1 to come back", "trainer-1")], [("trainer-1",)]),
        ([wait("a slot", "trainer", detail="as the trainer; the orchestrator) of its (own")], [("trainer",)]),
        ([wait("itself", "orchestrator")], [()]),
        ([], []),
    ],
)
def test_peers_are_recognized_by_name_or_address(waits: list[DeclaredWait], peers: list[tuple[str, ...]]) -> None:
    others = [
        service("inference", addresses=("127.0.0.1:8000",)),
        service("orchestrator"),
        service("trainer", addresses=("127.0.0.1:9102",)),
        service("trainer-1"),
    ]
    assert [wait.peers for wait in find_waits(service("orchestrator", *waits), others)] == peers


@pytest.mark.parametrize("waits", [{}, {"waits": None}, {"waits": "words"}, {"waits": [{"who": 1}]}, {"waits": [7]}])
def test_service_of_the_version_before_is_told_in_its_words(waits: dict[str, Any]) -> None:
    health = {"status": "ok", "waiting_for": "batcher: groups; scheduler: version 3 from the trainer"} | waits
    diagnosis = diagnose(run(service("orchestrator", health=health), service("trainer")))
    words = "batcher: groups; scheduler: version 3 from the trainer"
    assert [(wait.what, wait.peers) for wait in diagnosis.waits] == [(words, ())]
    assert diagnosis.conclusion == f"orchestrator waits for {words}; trainer works"


def test_doctor_reads_no_sentences() -> None:
    """Who waits for whom is data: a wait that can be told only by parsing words is a field that is missing."""
    sources = {path.name: path.read_text() for path in Path(runtime.doctor.__file__).parent.glob("*.py")}
    assert "diagnosis.py" in sources
    assert [name for name, text in sources.items() if {"re", "regex"} & set(imported(text))] == []


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize(
    ("evidence", "condition"),
    [
        (service("a"), Condition.WORKING),
        (service("a", wait("something")), Condition.WAITING),
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
    diagnosis = diagnose(run(service("orchestrator", VERSION), frozen))
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
    ended = "exit 137: inference was killed by SIGKILL; its output is in runs/x/logs/inference.out"
    launcher = dead("rl", ended=ended, killed={"inference": "SIGKILL"})
    diagnosis = diagnose(run(dead("inference"), launcher, dead("trainer", ended="exit 0")))
    assert diagnosis.conclusion == "trainer has ended (exit 0); inference is dead (it was killed by SIGKILL)"


def test_healthy_run_has_no_culprit() -> None:
    diagnosis = diagnose(run(service("inference"), service("orchestrator", wait("groups for batch 4")), TRAINER))
    assert diagnosis.culprit is None
    assert diagnosis.conclusion.endswith("orchestrator waits for groups for batch 4")
    assert "inference works" in diagnosis.conclusion


def test_long_wait_says_how_long() -> None:
    slow = service("orchestrator", health=told(wait("the trainer", "trainer"), progress_age_s=300.0))
    assert diagnose(run(slow)).conclusion == "orchestrator waits for the trainer (no progress for 300 s)"


def test_two_that_wait_for_each_other_are_both_in_the_sentence() -> None:
    orchestrator = service("orchestrator", VERSION)
    diagnosis = diagnose(run(orchestrator, service("trainer", wait("batch 4 from the orchestrator", "orchestrator"))))
    assert diagnosis.conclusion.count(" waits for ") == 2
    assert diagnosis.culprit is None


def test_worst_service_is_the_culprit_even_if_nobody_waits_for_it() -> None:
    stalled = service("orchestrator", health=told(wait("x"), status="stalled", progress_age_s=901.0))
    diagnosis = diagnose(run(stalled, dead("trainer-1", ended="exit 1: ValueError()")))
    assert diagnosis.culprit == "trainer-1"
    assert "orchestrator is stalled (no progress for 901 s), waiting for x" in diagnosis.conclusion


def test_of_two_dead_the_one_that_is_waited_for_is_the_culprit() -> None:
    others = [dead("inference", ended="exit 1: x"), dead("trainer", ended="exit 76: y")]
    assert (
        diagnose(run(*others, service("orchestrator", wait("version 2 of the trainer", "trainer")))).culprit
        == "trainer"
    )
    assert diagnose(run(*others, service("orchestrator", wait("inference", "inference")))).culprit == "inference"


def test_stalled_service_blames_whom_it_waits_for() -> None:
    health = told(wait("policy version 1 from the trainer", "trainer"), status="stalled", progress_age_s=901.0)
    stalled = service("orchestrator", health=health)
    diagnosis = diagnose(run(stalled, service("trainer", health={"status": "starting"})))
    assert diagnosis.culprit == "trainer"
    assert diagnosis.conclusion.endswith("; trainer is starting")
    health = told(wait("batch 1 from the orchestrator", "orchestrator"), status="stalled", progress_age_s=901.0)
    assert diagnose(run(stalled, service("trainer", health=health))).culprit in ("orchestrator", "trainer")
    assert diagnose(run(stalled)).culprit == "orchestrator"


def test_launcher_is_no_part_of_the_chain() -> None:
    assert diagnose(run(dead("rl"))).conclusion == "no service was ever started in runs/x"


def test_services_that_wait_come_before_those_they_wait_for() -> None:
    names = ["inference", "orchestrator", "trainer"]
    waits = [wait(name, name) for name in names]
    diagnosis = diagnose(run(service(names[0]), service(names[1], waits[0]), service(names[2], waits[1])))
    said = [part.split()[0] for part in diagnosis.conclusion.split("; ")]
    assert said == list(reversed(names))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_empty_run_has_no_positions(run_dir: RunDir) -> None:
    assert read_positions(run_dir) == {}


def test_directory_that_is_not_there_has_no_positions(tmp_path: Path) -> None:
    assert read_positions(RunDir(tmp_path / "absent")) == {}


def test_positions_of_a_run(run_dir: RunDir) -> None:
    for step in (4, 5, 6):
        write(run_dir.outbox / f"step-{step:08d}.batch", "")
    progress = {"run_id": "x", "last_trained": 5, "last_committed": 3, "last_retired": 0, "weights": {"version": 5}}
    write(run_dir.outbox / "progress.json", json.dumps(progress))
    write(run_dir.metrics / "trainer.jsonl", '{"step": 4}\n{"step": 5, "time": 1.5}\n')
    write(run_dir.ledger / "rollouts.jsonl", '{"seq": 1}\n{"seq": 2}\n')
    write(run_dir.checkpoints / "step-00000003" / "manifest.json", "{}")
    write(run_dir.checkpoints / "step-00000006" / "model.bin", "a save that has not ended")
    write(run_dir.weights / "v00000005" / "manifest.json", "{}")
    assert read_positions(run_dir) == {
        "last step of trainer": "5",
        "ledger of rollouts": '{"seq": 2}',
        "batches in the outbox": "4 to 6",
        "last trained step": "5",
        "last committed step": "3",
        "announced version": "5",
        "newest whole checkpoint": "3",
        "newest published version": "5",
    }


def test_torn_and_broken_lines_are_passed_over(run_dir: RunDir) -> None:
    write(run_dir.metrics / "trainer.jsonl", '{"step": 7}\nnot json\n[1]\n{"step": 8')
    write(run_dir.outbox / "progress.json", "{torn")
    assert read_positions(run_dir) == {"last step of trainer": "7"}


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (3 * TAIL_BYTES) + b"end\xff")
    assert len(read_tail(path)) == TAIL_BYTES
    assert read_tail(path).endswith("end�")
    assert read_tail(tmp_path / "absent") == ""
