"""`rl doctor RUN`: who waits for whom and which service is to blame, as a tree in the terminal or as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from runtime.base.printable import printable
from runtime.doctor.diagnosis import Condition, Diagnosis, diagnose
from runtime.doctor.evidence import Evidence, ServiceEvidence, gather_evidence
from runtime.errors import ExitCode, UserError
from runtime.health.health import HealthReport
from runtime.run_dir.run_dir import RunDir

USAGE = "usage: rl doctor RUN_DIRECTORY [--json] (for example rl doctor runs/default)"
STYLES = {
    Condition.ENDED: "dim",
    Condition.WORKING: "green",
    Condition.WAITING: "cyan",
    Condition.STARTING: "yellow",
    Condition.STALLED: "bold red",
    Condition.SILENT: "bold red",
    Condition.FROZEN: "bold red",
    Condition.DEAD: "bold red",
}


def as_json(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, object]:
    """Evidence and diagnosis as plain values."""
    services = {
        service.name: asdict(service) | {"condition": diagnosis.conditions.get(service.name)}
        for service in evidence.services
    }
    return {
        "run": evidence.run,
        "services": services,
        "positions": dict(evidence.positions),
        "waits": [{"waiter": wait.waiter, "what": wait.what, "peers": wait.peers} for wait in diagnosis.waits],
        "culprit": diagnosis.culprit,
        "conclusion": diagnosis.conclusion,
    }


def render(evidence: Evidence, diagnosis: Diagnosis) -> RenderableType:
    """The image: services, waits, positions, conclusion."""
    return Group(
        _services_table(evidence, diagnosis),
        *_waits_tree(diagnosis),
        _positions_table(evidence),
        *_last_lines(evidence, diagnosis),
        Text(),
        Text(printable(diagnosis.conclusion), style="bold red" if diagnosis.culprit else "bold"),
    )


def _services_table(evidence: Evidence, diagnosis: Diagnosis) -> Table:
    table = Table(title=_plain(f"Services of {evidence.run}"), title_justify="left", box=None, pad_edge=False)
    for column in ("service", "condition", "process", "last progress", "facts"):
        table.add_column(column, overflow="fold")
    for service in evidence.services:
        condition = diagnosis.conditions.get(service.name)
        style = STYLES.get(condition, "") if condition else ""
        shown = condition.value if condition else service.life.value
        facts = ", ".join(f"{key} {fact}" for key, fact in own_facts(service).items())
        cells = (_process(service), _progress(service), facts)
        table.add_row(Text(service.name), Text(shown, style=style), *map(_plain, cells))
    return table


def _process(service: ServiceEvidence) -> str:
    return f"pid {service.pid} on {service.host}" if service.pid else ""


def _progress(service: ServiceEvidence) -> str:
    age = service.health.get("progress_age_s")
    return f"{age:.1f} s ago" if isinstance(age, int | float) else service.problem or service.ended


def own_facts(service: ServiceEvidence) -> HealthReport:
    """What its `/health` says beyond what every service says."""
    fixed = {"service", "status", "progress_age_s", "waiting_for", "waits", "digest"}
    return {key: fact for key, fact in service.health.items() if key not in fixed and fact != ""}


def _waits_tree(diagnosis: Diagnosis) -> list[Text]:
    """Plain lines: a rich `Tree` would cut them at the width of the terminal, and the arrow is at their end."""
    lines = [Text("\nWho waits for whom", style="italic")]
    for number, wait in enumerate(diagnosis.waits, start=1):
        peers = f" ──▶ {', '.join(wait.peers)}" if wait.peers else ""
        branch = "└──" if number == len(diagnosis.waits) else "├──"
        lines.append(_plain(f"{branch} {wait.waiter} ── {wait.what}{peers}"))
    if not diagnosis.waits:
        lines.append(Text("└── no service says that it waits", style="dim"))
    return lines


def _positions_table(evidence: Evidence) -> Table:
    table = Table(title="\nPositions", title_justify="left", box=None, pad_edge=False, show_header=False)
    for label, value in evidence.positions.items():
        table.add_row(label, _plain(value))
    return table


def _last_lines(evidence: Evidence, diagnosis: Diagnosis) -> list[Text]:
    dead = [service for service in evidence.services if diagnosis.conditions.get(service.name) is Condition.DEAD]
    lines = []
    for service in dead:
        lines.append(Text(f"\nLast lines of {service.name}", style="italic"))
        lines += [_plain(f"  {line}") for line in service.last_lines]
    return lines


def _plain(text: str) -> Text:
    """Text that is neither read as markup by rich nor obeyed by a terminal: services quote what others wrote."""
    return Text(printable(text))


def doctor(argv: Sequence[str]) -> int:
    """Look at the run that `argv` names and say what is wrong with it: 0 if nothing is, else 1."""
    words = [word for word in argv if word != "--json"]
    if words in (["--help"], ["-h"]):
        sys.stdout.write(USAGE + "\n")
        return ExitCode.OK
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(USAGE)
    run_dir = RunDir(Path(words[0]))
    if not run_dir.services.is_dir():
        raise UserError(f"{run_dir.path} is not a run directory: it has no folder `services`")
    evidence = gather_evidence(run_dir)
    diagnosis = diagnose(evidence)
    if "--json" in argv:
        sys.stdout.write(json.dumps(as_json(evidence, diagnosis), indent=2) + "\n")
    else:
        Console(highlight=False, soft_wrap=True).print(render(evidence, diagnosis))
    return ExitCode.OK if diagnosis.culprit is None else ExitCode.FAILED
