"""`WorkerEnv`: an environment that lives in worker processes. Implements `EnvAdapter`.

    orchestrator process                                        worker process (`num_workers` of them)
    scheduler ──run──▶ WorkerEnv ──least busy──▶ Worker ══socket pair══ child.py: VerifiersAdapter
    engine pool ◀──generate── Worker ◀═════════════════════════════════ RemoteGenerator

Tokens are made by the engines of the orchestrator, so that weights, failover and staleness are one matter for all.
A worker that dies fails the rollouts it had (`worker_lost`) and is started again. A worker that let a rollout's
deadline pass and says nothing is blocked for good: it is killed. One that dies more than `MAX_RESTARTS` times without
finishing a rollout in between ends the run.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from loguru import logger

from chat.images.patches import ImageCache
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import ChatModel, Model
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.workers.link import FROM_WORKER, FrameLink, FromWorker, LoadRefused, Ready, receive_blocking
from orchestrator.envs.workers.process import COMMAND, END_S, WorkerModel, WorkerProcess
from orchestrator.envs.workers.worker import BLOCKED_S, Worker, WorkerGone, least_busy
from orchestrator.errors import EnvWorkersLostError, WorkerLinkError
from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure
from runtime.errors import UserError
from transport.backoff import Backoff
from transport.changes import Changes

START_TIMEOUT_S = 180.0
"""Seconds that a worker may take to load the environment: importing verifiers takes up to 6, the rest is for tasks that
are read from a disk or a network."""
MAX_RESTARTS = 5
"""Times in a row that a worker which died is started again without having finished a rollout. With the pauses below
they take 6 s: enough to outlive a service that restarts, not to hide an environment that cannot work."""
GRACE_S = 2.0
"""Seconds after a rollout's deadline in which the worker may still say what became of it."""
BACKOFF = Backoff(0.2, 10.0)
"""Before a worker is started again, by the number of its deaths in a row."""


class WorkerEnv:
    """Made by `load_in_workers`: `processes` have said `ready`, all the same."""

    def __init__(
        self,
        config: EnvConfig,
        model: Model,
        told: WorkerModel,
        processes: Sequence[WorkerProcess],
        ready: Ready,
        command: Sequence[str] = COMMAND,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self.name = config.label
        self.scores_jointly = ready.scores_jointly
        self.num_restarts = 0
        """Workers that were started again, in all."""
        self.problem = ""
        """How the last worker that died ended; empty while all are up."""
        self._config = config
        self._model = model
        self._told = told
        self._processes = list(processes)
        self._ready = ready
        self._command = command
        self._max_restarts = max_restarts
        self._examples = tuple(
            Example(self.name, example_id, position) for position, example_id in enumerate(ready.example_ids)
        )
        self._image_cache = ImageCache()
        self.workers: dict[int, Worker] = {}
        self._num_deaths = [0] * len(processes)
        self._tasks: list[asyncio.Task[None]] = []
        self._changes = Changes()
        self._broken: EnvWorkersLostError | None = None

    @property
    def examples(self) -> Sequence[Example]:
        """Those that the workers found; a payload is a position among them."""
        return self._examples

    @property
    def num_up(self) -> int:
        """Workers that take runs."""
        return len(self.workers)

    @property
    def num_workers(self) -> int:
        """Workers that there should be."""
        return self._config.num_workers

    async def start(self) -> None:
        """Connect to the workers, and keep them alive from now on."""
        for slot, process in enumerate(self._processes):
            link = await FrameLink.open(process.end_of_link, FROM_WORKER)
            self.workers[slot] = Worker(process, link, self._model, self._image_cache)
            self._tasks.append(asyncio.create_task(self._keep_alive(slot), name=f"worker {slot} of {self.name}"))
        self._processes.clear()

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        """As the environment in this process would; `worker_lost` if its worker dies. Raises `UserError`,
        `EnvWorkersLostError`."""
        slot: int | None = None
        try:
            async with asyncio.timeout(request.timeout_s + GRACE_S):
                slot = await self._pick()
                results = await self.workers[slot].run(request)
        except TimeoutError:
            failed = RolloutFailure(FailureReason.ENV_TIMEOUT, self._overdue(slot, request))
        except WorkerGone as gone:
            message = f"{request.group_id}#{request.index}: its worker ended: {gone}"
            failed = RolloutFailure(FailureReason.WORKER_LOST, message)
        else:
            if any(isinstance(result, Rollout) for result in results):
                self._num_deaths[slot] = 0
            return results
        return [failed] * (request.group_size if self.scores_jointly else 1)

    async def close(self) -> None:
        """End all workers. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes, self._processes = self._processes, []
        for process in processes:
            await asyncio.to_thread(process.end)

    async def _pick(self) -> int:
        """A slot whose worker is up; waits for one that is being started."""
        await self._changes.wait_for(lambda: self.workers or self._broken is not None)
        if self._broken is not None:
            raise self._broken
        best = least_busy(list(self.workers.values()))
        return next(slot for slot, worker in self.workers.items() if worker is best)

    def _overdue(self, slot: int | None, request: RolloutRequest) -> str:
        """A run is past its deadline: say so, and end its worker if that is what hangs."""
        what = f"{request.group_id}#{request.index} took longer than {request.timeout_s:g} s"
        worker = None if slot is None else self.workers.get(slot)
        if worker is None:
            return f"{what}: no worker was up"
        if worker.silent_s < BLOCKED_S:
            return what
        logger.warning("worker {} of {} is blocked ({:.0f} s): it is killed", slot, self.name, worker.silent_s)
        self.workers = {other: kept for other, kept in self.workers.items() if kept is not worker}
        worker.process.kill()
        return f"{what}: the environment blocks its worker"

    async def _keep_alive(self, slot: int) -> None:
        while (worker := self.workers.get(slot)) is not None:
            try:
                problem = await worker.serve()
            except asyncio.CancelledError:
                self.workers.pop(slot, None)
                await worker.end(END_S)
                raise
            self.workers.pop(slot, None)
            await self._replace(slot, await worker.end(0.0, problem))

    async def _replace(self, slot: int, ending: str) -> None:
        """Start the worker again; once any of them died too often in a row, leave the slot empty and end the run."""
        while slot not in self.workers:
            if self._broken is not None:
                return
            self._num_deaths[slot] += 1
            self.problem = f"worker {slot} of {self.name} ended: {ending}"
            if self._num_deaths[slot] > self._max_restarts:
                self._give_up(ending)
                return
            logger.warning("{}; its rollouts failed, it is started again", self.problem)
            await asyncio.sleep(BACKOFF.pause_s(self._num_deaths[slot]))
            try:
                self.workers[slot] = await self._start_again()
            except (WorkerLinkError, UserError, TimeoutError) as error:
                ending = str(error) or f"not ready after {START_TIMEOUT_S:g} s"
        self.num_restarts += 1
        self._changes.notify()
        if self.num_up == self.num_workers:
            self.problem = ""

    def _give_up(self, ending: str) -> None:
        times = self._max_restarts + 1
        self._broken = EnvWorkersLostError(
            f"env {self.name!r}: a worker ended {times} times in a row without finishing a rollout, at last: {ending}; "
            "mend the environment"
        )
        for worker in self.workers.values():
            worker.process.kill()
        self._changes.notify()

    async def _start_again(self) -> Worker:
        process = await asyncio.to_thread(WorkerProcess, self._config, self._told, self._command)
        link: FrameLink[FromWorker] | None = None
        try:
            link = await FrameLink.open(process.end_of_link, FROM_WORKER)
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await link.receive()
            if _checked(self._config, message) != self._ready:
                raise UserError(f"env {self.name!r} has other examples than before: they must not change in a run")
        except BaseException:
            if link is not None:
                with suppress(OSError):
                    await asyncio.shield(link.hang_up())
            await asyncio.shield(asyncio.to_thread(process.end, 0.0))
            raise
        return Worker(process, link, self._model, self._image_cache)


def load_in_workers(
    config: EnvConfig,
    model: Model,
    folder: Path | None,
    command: Sequence[str] = COMMAND,
    max_restarts: int = MAX_RESTARTS,
) -> WorkerEnv:
    """Start all workers of an environment and wait until they have loaded it; `folder` has the tokenizer. Blocks.
    Raises `UserError`."""
    told = WorkerModel(folder, is_chat=isinstance(model, ChatModel))
    processes = [WorkerProcess(config, told, command) for _ in range(config.num_workers)]
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        ready = [_wait_ready(config, process, deadline) for process in processes]
        if any(one != ready[0] for one in ready):
            raise UserError(f"env {config.label!r} has other examples in every worker: their order must be stable")
    except BaseException:
        for process in processes:
            process.end(0.0)
        raise
    return WorkerEnv(config, model, told, processes, ready[0], command, max_restarts)


def _wait_ready(config: EnvConfig, process: WorkerProcess, deadline: float) -> Ready:
    try:
        message = receive_blocking(process.end_of_link, FROM_WORKER, max(0.1, deadline - time.monotonic()))
    except WorkerLinkError as error:
        ending = process.end(0.0)
        raise UserError(f"env {config.label!r} does not load in a worker: {error} ({ending})") from error
    return _checked(config, message)


def _checked(config: EnvConfig, message: FromWorker | None) -> Ready:
    match message:
        case Ready():
            return message
        case LoadRefused(reason=reason):
            raise UserError(reason)
        case _:
            raise WorkerLinkError(f"a worker of env {config.label!r} ended while it loaded")


def worker_facts(envs: Sequence[WorkerEnv]) -> dict[str, int | str]:
    """How the workers are, for `/health`; empty if there are none."""
    if not envs:
        return {}
    problems = [env.problem for env in envs if env.problem]
    return {
        "env_workers": sum(env.num_up for env in envs),
        "env_workers_wanted": sum(env.num_workers for env in envs),
        "env_worker_restarts": sum(env.num_restarts for env in envs),
        "env_worker_problem": "; ".join(problems),
    }
