"""`Evaluator`: plays the evaluation environments at given policy versions while training goes on.

What is promised: every token of an evaluation is sampled by one version, the one it is reported under. The version is
pinned for as long as the evaluation lasts: newer weights wait, at most `timeout_s`, and training goes on with what the
staleness bound allows. A due version that was never live, because newer weights overtook it, is replaced by the first
live one after it. What is not finished at the deadline is counted as failed.

It never holds up the end of the run by more than `timeout_s`: the last version is evaluated when the last step is
committed, as soon as it is live, and is given up with a warning otherwise. After a restart, versions that have a
result file are not evaluated again; one that was interrupted is evaluated from its start.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from loguru import logger

from orchestrator.config.eval import EvalConfig
from orchestrator.envs.protocol import EnvAdapter
from orchestrator.eval.playing import Outcomes, play, unplayed
from orchestrator.eval.stats import eval_metrics
from runtime.health.health import Health
from transport.changes import Changes
from transport.durable import atomic_write

Log = Callable[[int, Mapping[str, float]], None]
LOOP = "evaluator"


class PinnedPolicy(Protocol):
    """The policy, as far as an evaluation needs it (`orchestrator.policy.weight_updates.WeightUpdates`)."""

    live: int

    def pinned(self) -> AbstractAsyncContextManager[int]:
        """The live version, which stays live inside the block."""
        ...


class Evaluator:
    """`notify` wakes it: a new version is live. Without environments it does nothing."""

    def __init__(
        self,
        config: EvalConfig,
        adapters: Sequence[EnvAdapter],
        policy: PinnedPolicy,
        folder: Path,
        health: Health,
        *,
        seed: int,
        max_steps: int,
        log: Log,
    ) -> None:
        self._config = config
        self._envs = list(zip(config.envs, adapters, strict=True))
        self._policy = policy
        self._folder = folder
        self._health = health
        self._seed = seed
        self._last_version = max_steps
        self._log = log
        self._last_done = last_evaluated(folder)
        self._changes = Changes()

    def notify(self) -> None:
        """Look again whether a version is due."""
        self._changes.notify()

    async def run(self) -> None:
        """Evaluate what is due until the last version is done."""
        while self._envs and (due := self._due()) is not None:
            if self._policy.live >= due:
                await self._evaluate()
            else:
                await self._changes.wait()

    async def finish(self, running: "asyncio.Task[None]", last_version: int) -> None:
        """Nothing comes after `last_version`: give its evaluation time, then end `running`, the task of `run`."""
        self._last_version = min(self._last_version, last_version)
        self.notify()
        _, pending = await asyncio.wait((running,), timeout=self._config.timeout_s)
        if pending:
            logger.warning("version {} is not evaluated: it was not live in time", self._due())
            running.cancel()

    def _due(self) -> int | None:
        return due_version(self._last_done, self._config.every_steps, self._last_version)

    async def _evaluate(self) -> None:
        outcomes = unplayed(self._envs)
        async with self._policy.pinned() as version:  # its time begins now: an update may have held it up for long
            await self._play(version, outcomes)
        values: dict[str, float] = {}
        for env, _ in self._envs:
            values |= eval_metrics(env.label, outcomes[env.label], env.pass_reward)
        await asyncio.to_thread(self._keep, version, values)
        self._last_done = version

    async def _play(self, version: int, outcomes: Outcomes) -> None:
        try:
            with self._health.waiting(f"the evaluation of version {version}", loop=LOOP):
                async with asyncio.timeout(self._config.timeout_s):
                    await play(
                        self._envs,
                        outcomes,
                        version,
                        seed=self._seed,
                        max_in_flight=self._config.max_in_flight,
                        on_result=self._health.progress,
                    )
        except TimeoutError:
            logger.warning("the evaluation of version {} took over {:g} s", version, self._config.timeout_s)

    def _keep(self, version: int, values: Mapping[str, float]) -> None:
        try:
            save_result(self._folder, version, values)
        except OSError as error:
            logger.warning("the evaluation of version {} is not saved: {}", version, error)
        self._log(version, values)
        rewards = {key: value for key, value in values.items() if key.startswith("eval_reward")}
        logger.info("version {} is evaluated: {}", version, ", ".join(f"{k} {v:.4g}" for k, v in rewards.items()))


_NAME = re.compile(r"eval-v(\d{8})\.json")


def due_version(last_done: int, every_steps: int, max_steps: int) -> int | None:
    """The first version after `last_done` (-1: none) that is due: multiples of `every_steps`, and the last one."""
    if last_done >= max_steps:
        return None
    return min((last_done // every_steps + 1) * every_steps, max_steps)


def result_path(folder: Path, version: int) -> Path:
    """Where the figures of `version` lie."""
    return folder / f"eval-v{version:08d}.json"


def last_evaluated(folder: Path) -> int:
    """The newest version that has been evaluated; -1 before the first."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("eval-v*.json"))
    return max((int(match[1]) for match in found if match), default=-1)


def save_result(folder: Path, version: int, values: Mapping[str, float]) -> None:
    """Keep the figures, durably. Raises `OSError`."""
    atomic_write(result_path(folder, version), msgspec.json.encode({"version": version, "metrics": values}))
