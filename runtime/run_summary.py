"""The last words of `rl`: what came out, where it is, how to look at it."""

import os
import shutil
import sys
from pathlib import Path

from runtime.progress import Progress, reward_change, sparkline
from runtime.run_dir import RunDir


def summarize(run_dir: RunDir, progress: Progress, *, seconds: float, finished: bool) -> str:
    """Several lines for people."""
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


def _reward(progress: Progress) -> list[str]:
    change = reward_change(progress.rewards)
    if change is None:
        return []
    curve = sparkline([progress.rewards[step] for step in sorted(progress.rewards)])
    return [f"  reward         {change[0]:.3f} → {change[1]:.3f} (mean of the first and last steps)  {curve}"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
