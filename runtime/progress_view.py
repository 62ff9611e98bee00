"""Shows a run to people: a live panel on a terminal, one plain line per step elsewhere."""

from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runtime.printable import printable
from runtime.progress import Progress, plain_line, sparkline

STYLES = {"inference": "cyan", "orchestrator": "magenta", "trainer": "green"}


class ProgressView(Protocol):
    """Where `rl` writes. `forward` is called from several threads."""

    def forward(self, service: str, line: str) -> None:
        """Show one line of a service's output."""
        ...

    def update(self, progress: Progress) -> None:
        """Show how far the run is. Called several times a second."""
        ...

    def __enter__(self) -> "ProgressView": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainView:
    """Log lines as they come, and one line for each new step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0

    def forward(self, service: str, line: str) -> None:
        """Print it with the service's name before it."""
        self._print(f"{service:<12} | {printable(line)}")

    def update(self, progress: Progress) -> None:
        """Print a line if there is a new step."""
        if progress.step > self._step:
            self._step = progress.step
            self._print(plain_line(progress))

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveView:
    """Log lines scroll by above a panel that stays."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def forward(self, service: str, line: str) -> None:
        """Print it above the panel."""
        name = Text(f"{service:<12} │ ", style=STYLES.get(service, "dim"))
        self._console.print(name + Text(printable(line)), soft_wrap=True)

    def update(self, progress: Progress) -> None:
        """Draw the panel anew."""
        self._live.update(render(progress))

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def render(progress: Progress) -> Group:
    """The panel: step and numbers, reward curve, who waits for whom."""
    curve = sparkline([progress.rewards[step] for step in sorted(progress.rewards)])
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("progress", style="dim"), Text(plain_line(progress), style="bold"))
    if progress.max_steps:
        table.add_row("", ProgressBar(total=progress.max_steps, completed=progress.step, width=40))
    if curve:
        table.add_row(Text("reward", style="dim"), Text(curve, style="green"))
    for service, what in progress.waits.items():
        table.add_row(Text("waiting", style="dim"), Text(f"{service} ← {what}", style=STYLES.get(service, "")))
    return Group(Text(), table)


def make_view(console: Console) -> ProgressView:
    """A live panel if `console` is a terminal."""
    return LiveView(console) if console.is_terminal else PlainView(console)
