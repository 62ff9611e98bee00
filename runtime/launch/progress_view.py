"""Shows a run to people: a live panel or plain lines while it runs, a summary at its end."""

import os
import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runtime.base.printable import printable
from runtime.metrics.progress import RunProgress, plain_line, reward_change, sparkline
from runtime.run_dir.run_dir import RunDir

STYLES = {"inference": "cyan", "orchestrator": "magenta", "trainer": "green"}


class ProgressView(Protocol):
    """Where `rl` writes. `forward` is called from several threads."""

    def forward(self, service: str, line: str) -> None:
        """Show one line of a service's output."""
        ...

    def update(self, progress: RunProgress) -> None:
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

    def update(self, progress: RunProgress) -> None:
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

    def update(self, progress: RunProgress) -> None:
        self._live.update(render_progress(progress))

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def render_progress(progress: RunProgress) -> Group:
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


def summarize(run_dir: RunDir, progress: RunProgress, *, seconds: float, finished: bool) -> str:
    """The summary at the end of a run, in several lines."""
    verb = "finished" if finished else "stopped (the same command continues it)"
    lines = [f"\nRun {run_dir.path.name} {verb} after {_duration(seconds)}, step {progress.step}", *_reward(progress)]
    lines.append(f"  look inside    {command('rl')} view {run_dir.path}")
    lines.append(f"  run directory  {run_dir.path}")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is not None:
        lines.append(f"  checkpoint     {checkpoint}")
        lines.append(
            f"  export         {command('trainer')} export --checkpoint {checkpoint} --out {run_dir.path / 'model'}"
        )
    lines.append(f"  metrics        {run_dir.metrics}/*.jsonl")
    if (run_dir.metrics / "tensorboard").is_dir():
        lines.append(f"  look at them   {command('tensorboard')} --logdir {run_dir.metrics / 'tensorboard'}")
    lines.append(f"  logs           {run_dir.logs}")
    return "\n".join(lines)


def command(name: str) -> str:
    """How to call a console script of this installation: by its name if the shell finds it, else by its path."""
    script = Path(sys.executable).with_name(name)
    if shutil.which(name) is not None or not script.exists():
        return name
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def newest_checkpoint(run_dir: RunDir) -> Path | None:
    """The newest checkpoint folder that has its manifest; whether its files are whole is the trainer's to check."""
    whole = [path.parent for path in run_dir.checkpoints.glob("step-*/manifest.json")]
    return max(whole, default=None)


def _reward(progress: RunProgress) -> list[str]:
    change = reward_change(progress.rewards)
    if change is None:
        return []
    curve = sparkline([progress.rewards[step] for step in sorted(progress.rewards)])
    return [f"  reward         {change[0]:.3f} → {change[1]:.3f} (mean of the first and last steps)  {curve}"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
