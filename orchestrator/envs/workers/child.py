"""The program of a worker: one environment, played on demand, with the orchestrator's engines as its model."""

import asyncio
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import ChatAsk, ChatReply, EngineError, InvalidResponse, Model
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, call_adapter
from orchestrator.envs.workers.link import (
    BEAT_S,
    TO_WORKER,
    Answer,
    Ask,
    AskChat,
    Beat,
    Broken,
    ChatAnswer,
    Drop,
    FrameLink,
    Load,
    LoadRefused,
    NoAnswer,
    Ready,
    RolloutsDone,
    RunRollouts,
    Stop,
    ToWorker,
    encode_frame,
    receive_blocking,
)
from orchestrator.errors import WorkerLinkError
from orchestrator.values.rollout import FailureReason, RolloutFailure
from runtime.errors import ServiceError
from runtime.process.logging import start_logging
from transport.wire.generation import GenerateReply, GenerateRequest


class RemoteRequests:
    """Sends questions and hands out the answers."""

    def __init__(self) -> None:
        self._link: FrameLink[ToWorker] | None = None
        self._waiting: dict[int, asyncio.Future[Answer | ChatAnswer]] = {}
        self._ids = itertools.count()

    def attach(self, link: "FrameLink[ToWorker]") -> None:
        """Ask over `link` from now on."""
        self._link = link

    async def ask(self, question: Callable[[int], msgspec.Struct]) -> Answer | ChatAnswer:
        """The answer to `question(id)`. The rollout's deadline bounds the wait; a cancelled one is dropped.
        Raises `EngineError`, `InvalidResponse`."""
        if self._link is None:
            raise EngineError("the worker is not connected")
        ask_id = next(self._ids)
        answer: asyncio.Future[Answer | ChatAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[ask_id] = answer
        try:
            self._link.send(question(ask_id))
            return await answer
        finally:
            del self._waiting[ask_id]
            if answer.cancelled():
                self._link.send(Drop(id=ask_id))

    def answered(self, message: Answer | ChatAnswer | NoAnswer) -> None:
        """Give the orchestrator's answer to the task that waits for it; without such a task it is thrown away."""
        waiting = self._waiting.get(message.id)
        if waiting is None or waiting.done():
            return
        if isinstance(message, NoAnswer):
            waiting.set_exception((InvalidResponse if message.is_invalid else EngineError)(message.reason))
        else:
            waiting.set_result(message)


class RemoteGenerator:
    """Implements `Generator`: the orchestrator asks its engines."""

    def __init__(self, requests: RemoteRequests) -> None:
        self._requests = requests

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        answer = await self._requests.ask(lambda ask_id: Ask(id=ask_id, request=request))
        assert isinstance(answer, Answer), "the orchestrator answers what it was asked"
        return answer.reply


class RemoteChat:
    """Implements `ChatModel`: the orchestrator asks its model."""

    def __init__(self, requests: RemoteRequests) -> None:
        self._requests = requests

    async def chat(self, ask: ChatAsk) -> ChatReply:
        answer = await self._requests.ask(lambda ask_id: AskChat(id=ask_id, request=ask))
        assert isinstance(answer, ChatAnswer), "the orchestrator answers what it was asked"
        return answer.reply


LoadAdapter = Callable[[EnvConfig, Model, Tokenizer | None], EnvAdapter]
LOAD_TIMEOUT_S = 60.0
ORPHAN_S = 2.0
"""Seconds that an orphan gets to end well."""


class WorkerProgram:
    """Plays runs until the orchestrator hangs up."""

    def __init__(self, adapter: EnvAdapter, requests: RemoteRequests) -> None:
        self._adapter = adapter
        self._requests = requests
        self._runs: dict[int, asyncio.Task[None]] = {}

    async def serve(self, end: socket.socket) -> None:
        """Returns when the orchestrator is gone."""
        link = await FrameLink.open(end, TO_WORKER)
        self._requests.attach(link)
        try:
            await self._adapter.start()
        except Exception as error:  # whatever it is, this environment does not start
            link.send(LoadRefused(reason=f"env {self._adapter.name!r} does not start: {type(error).__name__}: {error}"))
            return await link.close()
        ids = tuple(example.example_id for example in self._adapter.examples)
        link.send(Ready(example_ids=ids, scores_jointly=self._adapter.scores_jointly))
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(_beat(link))
            while (message := await link.receive()) is not None:
                self._take(tasks, link, message)
            for task in (beating, *self._runs.values()):
                task.cancel()
        await self._adapter.close()
        await link.close()

    def _take(self, tasks: asyncio.TaskGroup, link: "FrameLink[ToWorker]", message: ToWorker) -> None:
        match message:
            case RunRollouts(id=run_id):
                self._runs[run_id] = tasks.create_task(self._run(link, message))
                self._runs[run_id].add_done_callback(lambda _: self._runs.pop(run_id, None))
            case Stop(id=run_id) if run_id in self._runs:
                self._runs[run_id].cancel()
            case Answer() | ChatAnswer() | NoAnswer():
                self._requests.answered(message)
            case _:
                pass  # a stop that comes after the end

    async def _run(self, link: "FrameLink[ToWorker]", run: RunRollouts) -> None:
        request = msgspec.structs.replace(run.request, example=self._adapter.examples[run.request.example.payload])
        try:
            results = await call_adapter(self._adapter, request)
            link.send(RolloutsDone(id=run.id, results=tuple(results)))
        except ServiceError as error:
            link.send(Broken(id=run.id, reason=str(error)))
        except WorkerLinkError as error:
            failure = RolloutFailure(FailureReason.ENV_ERROR, f"{request.group_id}#{request.index}: {error}")
            num_results = request.group_size if self._adapter.scores_jointly else 1
            link.send(RolloutsDone(id=run.id, results=(failure,) * num_results))


async def _beat(link: "FrameLink[ToWorker]") -> None:
    while True:
        link.send(Beat())
        await asyncio.sleep(BEAT_S)


def main(descriptor: int, load_adapter: LoadAdapter = load_env) -> None:
    """Load what the first message names, then serve."""
    faulthandler.enable()
    start_logging()
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    end = socket.socket(fileno=descriptor)
    try:
        load = receive_blocking(end, TO_WORKER, LOAD_TIMEOUT_S)
    except WorkerLinkError:
        return  # the orchestrator went away meanwhile
    assert isinstance(load, Load), "the first message is Load"
    sys.path.extend(path for path in load.search_path if path not in sys.path)
    requests = RemoteRequests()
    try:
        config = EnvConfig.model_validate_json(load.env)
        tokenizer = None if load.model_path is None else Tokenizer.from_folder(Path(load.model_path))
        adapter = load_adapter(config, RemoteChat(requests) if load.is_chat else RemoteGenerator(requests), tokenizer)
    except ServiceError as error:
        with suppress(OSError):
            end.sendall(encode_frame(LoadRefused(reason=str(error))))
        return
    uvloop.run(WorkerProgram(adapter, requests).serve(end))


def _end_with_parent() -> None:
    """The orchestrator is gone: the link has ended, too, and a loop that turns ends well. Otherwise it is ended here,
    with whatever the environment has started."""
    while os.read(0, 4096):  # unbuffered: a lock that this thread holds would abort the interpreter's own end
        pass
    time.sleep(ORPHAN_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
