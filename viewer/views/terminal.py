"""`rl view RUN --terminal`: steps, groups and rollouts as text, for people on SSH.

On an interactive terminal it asks for more.

What a model wrote may hold escape sequences that move the cursor, rename the window or type for the user: control
characters are replaced before anything is printed.
"""

import argparse
import re
import shlex
import sys

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime.base.printable import printable
from runtime.metrics.progress import sparkline
from viewer.answers.answers import answer
from viewer.answers.groups import Said
from viewer.errors import NotRecorded, ViewerError
from viewer.index.run import Json, Run

HELP = "s: steps   g STEP: groups of a step   o GROUP: its rollouts   r STEP.LINE: a rollout   d: doctor   q: quit"
MAX_STEPS = 20


def show(run: Run, console: Console, arguments: argparse.Namespace) -> int:
    """Print what the arguments ask for; without any, an overview, and then what the user types."""
    if arguments.rollout:
        console.print(_rollout(run, arguments.rollout))
    elif arguments.group:
        console.print(_group(run, arguments.group))
    elif arguments.step is not None:
        console.print(_groups(run, arguments.step))
    else:
        console.print(overview(run))
        if console.is_terminal and sys.stdin.isatty():
            _converse(run, console)
    return 0


def plain(text: object) -> str:
    """Text without control characters: newlines and tabs stay, everything else that a terminal would obey is shown."""
    return printable(str(text))


def overview(run: Run) -> RenderableType:
    """The run in one screen: reward, steps, and one lesson."""
    story = answer(run, "story", {})
    group = story["group"]
    parts: list[RenderableType] = [_headline(run), _steps(run)]
    if isinstance(group, dict):
        parts += [Text("\nA group with a good and a bad rollout", style="bold"), _group(run, str(group["group_id"]))]
        if story["good"]:
            parts.append(_rollout(run, str(story["good"])))
    return Group(*parts)


def _converse(run: Run, console: Console) -> None:
    console.print(Text(HELP, style="dim"))
    while True:
        try:
            words = shlex.split(console.input("> "))
        except (EOFError, KeyboardInterrupt):
            return
        except ValueError:
            continue
        if words[:1] == ["q"]:
            return
        try:
            console.print(_reply(run, words))
        except ViewerError as error:
            console.print(Text(plain(error), style="red"))


def _reply(run: Run, words: list[str]) -> RenderableType:
    match words:
        case ["s"] | []:
            return _steps(run)
        case ["g", step]:
            return _groups(run, step)
        case ["o", group_id]:
            return _group(run, group_id)
        case ["r", rollout_id]:
            return _rollout(run, rollout_id)
        case ["d"]:
            return Text(plain(answer(run, "circle", {})["conclusion"]))
    return Text(HELP, style="dim")


def _headline(run: Run) -> Text:
    rewards = [value for row in run.metrics["orchestrator"] if (value := row.get("reward/all/mean")) is not None]
    line = Text(plain(run.name), style="bold")
    if rewards:
        line.append(f"  reward {rewards[0]:.3f} → {rewards[-1]:.3f}  ", style="")
        line.append(sparkline(rewards), style="green")
    return line


def _steps(run: Run) -> Table:
    table = _table("step", "rollouts", "trained", "filtered", "failed", "reward", "loss", "tokens/s", "seconds")
    batches = _rows(answer(run, "batches", {}), "batches")[:MAX_STEPS]
    for batch in batches:
        trainer = batch["trainer"]
        assert isinstance(trainer, dict)
        names = ("step", "num_rollouts", "num_trained", "num_filtered", "num_failed", "reward_mean")
        cells = [_number(batch[name]) for name in names]
        cells += [_number(trainer.get(name)) for name in ("loss", "tokens_per_s", "time/step_s")]
        table.add_row(*cells)
    return table


def _groups(run: Run, step: object) -> Table:
    table = _table("group", "rollouts", "failed", "lowest", "highest", "mean", "fate")
    groups = _rows(answer(run, "groups", {"step": str(step), "sort": "spread"}), "groups")
    if not groups:
        raise NotRecorded(f"no group of step {step} is recorded in this run")
    for group in groups:
        names = ("num_rollouts", "num_failed", "reward_min", "reward_max", "reward_mean")
        numbers = [_number(group[name]) for name in names]
        table.add_row(Text(plain(group["group_id"])), *numbers, Text(plain(group["state"])))
    return table


def _group(run: Run, group_id: str) -> RenderableType:
    found = answer(run, "group", {"id": group_id})
    table = _table("rollout", "reward", "advantage", "fate", "answer")
    for rollout in _rows(found, "rollouts"):
        said = rollout.get("message") or " ".join(one.text for one in _said(rollout, "answer"))
        style = _sign_style(rollout.get("advantage"))
        cells = [Text(_number(rollout.get(name)), style=style) for name in ("reward", "advantage")]
        table.add_row(str(rollout["id"]), *cells, Text(plain(rollout["state"])), Text(plain(said)[:200]))
    prompt = "\n".join(plain(one.text) for one in _said(found, "prompt"))
    return Group(Panel(Text(prompt), title=Text(plain(group_id)), title_align="left"), table)


def _rollout(run: Run, rollout_id: str) -> RenderableType:
    rollout = answer(run, "rollout", {"id": rollout_id})
    figures = f"reward {_number(rollout.get('reward'))}  advantage {_number(rollout.get('advantage'))}"
    parts: list[RenderableType] = [Text(f"\n{plain(rollout['trajectory_id'])}  {figures}", style="bold")]
    parts += [_message(one) for one in (*_said(rollout, "prompt"), *_said(rollout, "answer"))]
    if rollout.get("failure"):
        parts.append(Text(plain(f"{rollout['failure']}: {rollout.get('message')}"), style="red"))
    parts += [_tokens(answer(run, "sequence", {"id": str(name)})) for name in _rows(rollout, "sequences")]
    return Group(*parts)


def _message(said: Said) -> Text:
    return Text(f"{plain(said.role)}: ", style="cyan") + Text(plain(said.text), style="default")


def _tokens(sequence: Json) -> RenderableType:
    table = _table("token", "push", "advantage", "ratio", "logprob", "entropy", "KL", "masked")
    mask = _rows(sequence, "loss_mask")
    columns = ("push", "advantage", "ratio", "trainer_logprobs", "entropy", "mismatch_kl")
    for place, trained in enumerate(mask):
        if trained:
            values = [_rows(sequence, name)[place] for name in columns]
            text = re.sub(r"\n", "↵", plain(_rows(sequence, "texts")[place]))
            masked = "yes" if _rows(sequence, "is_masked")[place] else ""
            style = _sign_style(values[0])
            table.add_row(Text(repr(text)[1:-1], style=style), *(_number(value) for value in values), masked)
    place_text = "step {step}, rank {rank}, micro batch {micro_batch}, position {position} of {micro_batch_tokens}"
    return Group(Text("trained in " + place_text.format(**sequence), style="dim"), table)


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        is_text = head in ("group", "fate", "answer", "token", "rollout")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    return table


def _rows(found: Json, name: str) -> list[Json]:
    rows = found.get(name)
    return rows if isinstance(rows, list) else []


def _said(found: Json, name: str) -> list[Said]:
    said = found.get(name)
    return said if isinstance(said, list) else []


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return "–" if value is None else str(value)


def _sign_style(value: object) -> str:
    if not isinstance(value, float | int) or value == 0:
        return ""
    return "green" if value > 0 else "red"
