"""`Worker`: the orchestrator's side of one live worker: runs in flight, and generations on behalf of the worker."""

import asyncio
import itertools
import time
from collections.abc import Sequence

import msgspec
import xxhash

from chat.images.patches import ImageCache, ImagePatches
from orchestrator.engines.protocol import ChatModel, EngineError, InvalidResponse, Model
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.envs.workers.link import (
    Answer,
    Ask,
    AskChat,
    Broken,
    ChatAnswer,
    Drop,
    FrameLink,
    FromWorker,
    NoAnswer,
    RolloutsDone,
    RunRollouts,
    Stop,
)
from orchestrator.envs.workers.process import WorkerProcess
from orchestrator.errors import WorkerLinkError
from orchestrator.values.rollout import Rollout, RolloutFailure
from runtime.errors import UserError
from transport.errors import CodecError
from transport.wire.generation import GenerateRequest

BLOCKED_S = 3.0
"""Seconds of silence after which a worker's event loop is taken to be blocked."""

Results = list[Rollout | RolloutFailure]


class WorkerGone(Exception):
    """The worker ended before the run did. The message says how."""


class Worker:
    """`serve` must run while `run` is used; it returns when the worker is gone, and all its runs fail with it. `cache`
    is that of all workers of the environment, over which the rollouts of a group are spread."""

    def __init__(self, process: WorkerProcess, link: "FrameLink[FromWorker]", model: Model, cache: ImageCache) -> None:
        self.process = process
        self._link = link
        self._model = model
        self._image_cache = cache
        self._runs: dict[int, asyncio.Future[Results]] = {}
        self._asks: dict[int, asyncio.Task[None]] = {}
        self._ids = itertools.count()
        self._last_heard = time.monotonic()
        self._gone = ""

    @property
    def num_in_flight(self) -> int:
        return len(self._runs)

    @property
    def silent_s(self) -> float:
        """Seconds since its last message. It beats every second, unless its event loop is blocked."""
        return time.monotonic() - self._last_heard

    async def run(self, request: RolloutRequest) -> Results:
        """What the environment in the worker returns. Raises `WorkerGone`, `UserError`. The caller has the deadline."""
        if self._gone:
            raise WorkerGone(self._gone)
        run_id = next(self._ids)
        results: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self._runs[run_id] = results
        try:
            self._link.send(RunRollouts(id=run_id, request=request))
            return await results
        finally:
            del self._runs[run_id]
            if results.cancelled():
                self._link.send(Stop(id=run_id))

    async def serve(self) -> str:
        """Take its messages until it hangs up, or says what makes no sense; returns what was wrong then."""
        problem = ""
        async with asyncio.TaskGroup() as tasks:
            try:
                while (message := await self._link.receive()) is not None:
                    self._last_heard = time.monotonic()
                    self._take(tasks, message)
            except WorkerLinkError as error:
                problem = f" after a bad message: {error}"
            for task in list(self._asks.values()):
                task.cancel()
        return problem

    async def end(self, grace_s: float, problem: str = "") -> str:
        """Hang up, end the process, fail the runs it had; how it ended."""
        await self._link.hang_up()
        self._gone = await asyncio.to_thread(self.process.end, grace_s) + problem
        for waiting in self._runs.values():
            if not waiting.done():
                waiting.set_exception(WorkerGone(self._gone))
        return self._gone

    def _take(self, tasks: asyncio.TaskGroup, message: FromWorker) -> None:
        match message:
            case Ask():
                request, images = _without_frame(message.request, self._image_cache)
                ask = Ask(id=message.id, request=request)
                self._asks[ask.id] = tasks.create_task(self._answer(ask, images))
            case AskChat():
                self._asks[message.id] = tasks.create_task(self._answer(message))
            case Drop() if message.id in self._asks:
                self._asks[message.id].cancel()
            case RolloutsDone() if self._is_awaited(message.id):
                results = [_with_shared_images(result, self._image_cache) for result in message.results]
                self._runs[message.id].set_result(results)
            case Broken() if self._is_awaited(message.id):
                self._runs[message.id].set_exception(UserError(message.reason))
            case _:
                pass  # a beat, or an answer that is not waited for any more

    def _is_awaited(self, run_id: int) -> bool:
        """A run that was cancelled, or is over its deadline, is still in `_runs` until its task takes notice."""
        results = self._runs.get(run_id)
        return results is not None and not results.done()

    async def _answer(self, ask: Ask | AskChat, images: ImagePatches | None = None) -> None:
        """`images` are held here so that others who ask find them."""
        try:
            self._link.send(await self._reply(ask))
        except EngineError as error:
            invalid = isinstance(error, InvalidResponse)
            self._link.send(NoAnswer(id=ask.id, reason=str(error), is_invalid=invalid))
        except Exception as error:  # a bug in an engine costs this rollout, as it does without workers
            self._link.send(NoAnswer(id=ask.id, reason=f"{type(error).__name__}: {error}", is_invalid=False))
        finally:
            self._asks.pop(ask.id, None)

    async def _reply(self, ask: Ask | AskChat) -> Answer | ChatAnswer:
        if isinstance(ask, AskChat):
            if not isinstance(self._model, ChatModel):
                raise EngineError("the model takes tokens, not messages")
            return ChatAnswer(id=ask.id, reply=await self._model.chat(ask.request))
        if isinstance(self._model, ChatModel):
            raise EngineError("the model takes messages, not tokens")
        return Answer(id=ask.id, reply=await self._model.generate(ask.request))


def least_busy(workers: Sequence[Worker]) -> Worker:
    """Who takes the next run: one whose loop turns, if there is one, and of those the one with the least to do."""
    return min(workers, key=lambda worker: (worker.silent_s > BLOCKED_S, worker.num_in_flight))


def _without_frame(request: GenerateRequest, cache: ImageCache) -> tuple[GenerateRequest, ImagePatches | None]:
    """`request` without the frame it came in, and the images in it, shared with all who have the same."""
    if not request.mm_kwargs:
        return request, None
    digest = xxhash.xxh3_128()
    for name in sorted(request.mm_kwargs):
        digest.update(request.mm_kwargs[name].data)
    try:
        images = ImagePatches((digest.hexdigest(),), **request.mm_kwargs)
    except (CodecError, TypeError) as error:
        raise WorkerLinkError(f"the images of a message do not make sense: {error}") from error
    images = cache.setdefault(images.digests, images)
    text = msgspec.msgpack.encode(msgspec.structs.replace(request, mm_kwargs={}))
    copied = msgspec.msgpack.decode(text, type=GenerateRequest)
    return msgspec.structs.replace(copied, mm_kwargs=images.mm_kwargs), images


def _with_shared_images(result: Rollout | RolloutFailure, cache: ImageCache) -> Rollout | RolloutFailure:
    if isinstance(result, RolloutFailure) or all(branch.images is None for branch in result.branches):
        return result
    branches = [
        branch
        if branch.images is None
        else msgspec.structs.replace(branch, images=cache.setdefault(branch.images.digests, branch.images))
        for branch in result.branches
    ]
    return msgspec.structs.replace(result, branches=tuple(branches))
