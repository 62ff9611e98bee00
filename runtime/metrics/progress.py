"""Follows metric files that other processes append to; how far a run is, folded from their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import msgspec

MetricRow = Mapping[str, float | None]
"""One line: `step`, `time`, and the values by key."""
_rows: msgspec.json.Decoder[dict[str, int | float | None]] = msgspec.json.Decoder(dict[str, int | float | None])


class MetricTail:
    """Each `read` returns the whole lines that were appended since the last one. The file may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[MetricRow]:
        """New rows, oldest first. A line without its end is left for the next call; what is not a row is skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows: list[MetricRow] = []
        for line in whole.splitlines():
            try:
                rows.append(_rows.decode(line))
            except msgspec.MsgspecError:
                continue
        return rows


REWARD = "reward/all/mean"
BLOCKS = "▁▂▃▄▅▆▇█"
ENDS = 5
"""Steps at either end of a run that a summary takes the mean of."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """`step` is the newest step that `main_service` reported; everything else is `None` until it was measured."""

    main_service: str
    max_steps: int | None = None
    step: int = 0
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Mean reward by step."""
    tokens_per_s: float | None = None
    staleness: float | None = None
    """Largest staleness in the newest step."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """What each service waits for."""

    @property
    def reward(self) -> float | None:
        """Mean reward of `step`. (Producers run ahead: the newest reward may be of a later step.)"""
        return self.rewards.get(self.step)


def advance(progress: RunProgress, service: str, row: MetricRow) -> RunProgress:
    """`progress` after a metric row of `service`.

    The main service (the trainer) counts the steps. Rewards of any other service (the orchestrator) win over its own:
    the trainer only sees groups with a signal.
    """
    step = int(row.get("step") or 0)
    is_main = service == progress.main_service
    rewards = dict(progress.rewards)
    reward = row.get(REWARD)
    if reward is not None and not (is_main and step in rewards):
        rewards[step] = reward
    progress = replace(progress, rewards=rewards)
    if not is_main:
        return progress
    return replace(progress, step=step, tokens_per_s=row.get("tokens_per_s"), staleness=row.get("staleness/max"))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """`values` as a curve of `width` characters at most, each the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    bottom, top = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (top - bottom) if top > bottom else 0.0
    return "".join(BLOCKS[round((mean - bottom) * scale)] for mean in means)


def plain_line(progress: RunProgress) -> str:
    """`step 12/100  reward 0.431  1234 tokens/s  staleness 1`; what was not measured is left out."""
    total = f"/{progress.max_steps}" if progress.max_steps else ""
    parts = [f"step {progress.step}{total}"]
    if (reward := progress.reward) is not None:
        parts.append(f"reward {reward:.3f}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:.0f} tokens/s")
    if progress.staleness is not None:
        parts.append(f"staleness {progress.staleness:g}")
    return "  ".join(parts)


def reward_change(rewards: Mapping[int, float]) -> tuple[float, float] | None:
    """Mean reward of the first and of the last `ENDS` steps; `None` without rewards."""
    values = [rewards[step] for step in sorted(rewards)]
    if not values:
        return None
    first, last = values[:ENDS], values[-ENDS:]
    return sum(first) / len(first), sum(last) / len(last)
