"""Who waits for whom, and who is to blame: a pure function of the evidence.

A service declares what it waits for and who has to give it, by name or by address (`DeclaredWait` of runtime/health).

    trainer ──batch 12──▶ orchestrator ──engine http://127.0.0.1:8000──▶ inference: dead   ◀── culprit
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from runtime.doctor.evidence import Evidence, Life, ServiceEvidence, netloc_of
from runtime.health.health import read_waits

MOVING_S = 30.0
"""Seconds since its last progress within which a service counts as moving."""
MAX_DETAIL_CHARS = 80
"""Longer details are left out of the conclusion; the waits have them in full."""
LAUNCHER = "rl"
"""It has a lock, but serves no peer and waits for none."""
_ERROR_LEVELS = ("ERROR", "CRITICAL")


class Condition(StrEnum):
    """Health of a service as the doctor sees it. The later ones are worse."""

    ENDED = "ended"
    """Left on purpose, exit code 0."""
    WORKING = "working"
    WAITING = "waiting"
    STARTING = "starting"
    STALLED = "stalled"
    """Answers, but has made no progress for a long time."""
    SILENT = "silent"
    """Its process exists and does not answer."""
    FROZEN = "frozen"
    DEAD = "dead"


_SEVERITY = {condition: severity for severity, condition in enumerate(Condition)}
_SICK = frozenset({Condition.STALLED, Condition.SILENT, Condition.FROZEN, Condition.DEAD})


@dataclass(frozen=True, slots=True)
class Wait:
    """`waiter` waits for `what`, which `peers` have to give (none: it is its own business, or an unknown one's)."""

    waiter: str
    what: str
    peers: tuple[str, ...]
    brief: str
    """`what` without a long detail."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who waits for whom in a run, and which service to look at: the answer of `rl doctor`."""

    conditions: Mapping[str, Condition]
    waits: tuple[Wait, ...]
    culprit: str | None
    """The service to look at; `None` if nothing is wrong."""
    conclusion: str
    """All of it in one sentence."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """The condition of each service, who waits for whom, and the service to look at first."""
    services = {service.name: service for service in evidence.services if service.name != LAUNCHER}
    killed = {name: by for service in evidence.services for name, by in service.killed.items()}
    services |= {
        name: replace(services[name], ended=f"it was killed by {by}")
        for name, by in killed.items()
        if name in services and not services[name].ended
    }
    conditions = {name: find_condition(service) for name, service in services.items()}
    waits = tuple(wait for service in services.values() for wait in find_waits(service, evidence.services))
    culprit = _find_culprit(conditions, waits)
    sentences = [_describe(services[name], conditions[name], waits) for name in _chain(conditions, waits, culprit)]
    conclusion = "; ".join(sentences) or f"no service was ever started in {evidence.run}"
    return Diagnosis(conditions, waits, culprit, conclusion)


def find_condition(service: ServiceEvidence) -> Condition:
    """The condition of one service, seen alone."""
    if service.life is Life.FROZEN:
        return Condition.FROZEN
    if service.life is Life.GONE or (service.life is Life.UNKNOWN and not service.health):
        return Condition.ENDED if service.ended == "exit 0" else Condition.DEAD
    if not service.health:
        return Condition.SILENT if service.problem else Condition.STARTING
    if service.health.get("status") in ("stalled", "dead"):
        return Condition.STALLED
    if service.health.get("status") in ("starting", "loading"):
        return Condition.STARTING
    return Condition.WAITING if service.health.get("waiting_for") else Condition.WORKING


def find_waits(service: ServiceEvidence, others: Sequence[ServiceEvidence]) -> Iterator[Wait]:
    """What a live service says it waits for, one for each of its loops."""
    for wait in read_waits(service.health):
        named = {netloc_of(peer) or peer for peer in wait.peers}
        peers = [
            other.name for other in others if other.name != service.name and named & {other.name, *other.addresses}
        ]
        yield Wait(service.name, str(wait), tuple(peers), wait.brief(MAX_DETAIL_CHARS))


def _find_culprit(conditions: Mapping[str, Condition], waits: Sequence[Wait]) -> str | None:
    """The sickest service, of equals one that is waited for; but who is only stalled blames whom it waits for."""
    awaited = {peer for wait in waits for peer in wait.peers}
    sick = [name for name, condition in conditions.items() if condition in _SICK]
    culprit = max(sick, key=lambda name: (_SEVERITY[conditions[name]], name in awaited), default=None)
    seen: set[str] = set()
    while culprit is not None and conditions[culprit] is Condition.STALLED and culprit not in seen:
        seen.add(culprit)
        peers = [peer for wait in waits if wait.waiter == culprit for peer in wait.peers if peer in conditions]
        culprit = max(peers, key=lambda name: _SEVERITY[conditions[name]], default=culprit)
    return culprit


def _chain(conditions: Mapping[str, Condition], waits: Sequence[Wait], culprit: str | None) -> list[str]:
    """All services, each before those it waits for as far as cycles allow; the culprit last."""
    peers = {name: [peer for wait in waits if wait.waiter == name for peer in wait.peers] for name in conditions}
    awaited = {peer for names in peers.values() for peer in names}
    order: list[str] = []

    def visit(name: str) -> None:
        if name in conditions and name not in order:
            order.append(name)
            for peer in peers[name]:
                visit(peer)

    for name in sorted(conditions, key=lambda name: (name in awaited, name)):
        visit(name)
    return sorted(order, key=lambda name: name == culprit)


def _describe(service: ServiceEvidence, condition: Condition, waits: Sequence[Wait]) -> str:
    """One clause about one service."""
    name, age = service.name, service.health.get("progress_age_s")
    since = f" (no progress for {age:.0f} s)" if isinstance(age, int | float) and age > MOVING_S else ""
    own = " and for ".join(wait.brief for wait in waits if wait.waiter == name)
    match condition:
        case Condition.ENDED:
            return f"{name} has ended ({service.ended})"
        case Condition.DEAD:
            return f"{name} is dead ({_last_words(service)})"
        case Condition.FROZEN:
            return f"{name} is frozen (pid {service.pid} got SIGSTOP: kill -CONT {service.pid})"
        case Condition.SILENT:
            return f"{name} (pid {service.pid}) does not answer: {service.problem}"
        case Condition.STALLED:
            return f"{name} is stalled{since}" + (f", waiting for {own}" if own else "")
        case Condition.STARTING:
            return f"{name} is starting" + (f", waiting for {own}" if own else "") + since
        case Condition.WAITING:
            return f"{name} waits for {own}{since}"
        case _:
            return f"{name} works{since}"


def _last_words(service: ServiceEvidence) -> str:
    if service.ended:
        return service.ended
    lines = [line for line in service.last_lines if any(level in line for level in _ERROR_LEVELS)] or service.last_lines
    said = f"last line of its log: {lines[-1].strip()}" if lines else "its log is empty"
    return f"it left no word; {said}"
