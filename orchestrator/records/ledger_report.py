"""`orchestrator ledger RUN`: check that every dispatched rollout has exactly one fate, and print the table."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from runtime.errors import UserError
from transport.wire.ledger import Tally, tally

MAX_PROBLEMS = 20
"""Contradictions that are printed."""


def find_ledger(run: Path) -> Path:
    """The ledger of a run directory, or of a run of that name below `runs/`. Raises `UserError`."""
    for folder in (run, Path("runs") / run):
        path = folder / "ledger" / LEDGER_NAME
        if path.is_file():
            return path
    raise UserError(f"no ledger in {run}/ledger: give the run directory, for example runs/default")


def collapse(states: Counter[str]) -> dict[str, int]:
    """States for people: all `trained@N` as one row with their range, the rest sorted."""
    trained = {state: count for state, count in states.items() if state.startswith("trained@")}
    steps = sorted(int(state.removeprefix("trained@")) for state in trained)
    rows = {f"trained@{steps[0]}..{steps[-1]}": sum(trained.values())} if steps else {}
    return rows | {state: states[state] for state in sorted(states) if state not in trained}


def print_ledger(result: Tally, console: Console) -> None:
    """The table, and what does not add up."""
    table = Table("state", "rollouts", "share", title="ledger")
    for column in table.columns[1:]:
        column.justify = "right"
    for state, count in collapse(result.states).items():
        table.add_row(state, f"{count:,}", f"{count / max(1, result.num_dispatched):.1%}")
    table.add_section()
    table.add_row("sum of states", f"{result.num_terminal:,}")
    table.add_row("dispatched", f"{result.num_dispatched:,}")
    console.print(table)
    for problem in result.problems[:MAX_PROBLEMS]:
        console.print(Text(problem, style="red"))
    if len(result.problems) > MAX_PROBLEMS:
        console.print(f"[red]and {len(result.problems) - MAX_PROBLEMS} more[/red]")
    console.print("balances" if result.balances else "[bold red]does not balance[/bold red]")


def report_ledger(run: Path) -> int:
    """The exit code: 0 if the ledger balances, 1 if not."""
    result = tally(read_ledger(find_ledger(run)))
    print_ledger(result, Console())
    return 0 if result.balances else 1
