"""The canary over real HTTP: an engine that answers 200 and keeps old weights ends the run, by name."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import web

from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_engine import HttpEngine
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.errors import CanaryError
from orchestrator.policy.canary import CanaryCheck
from runtime.errors import find_service_error
from tests.orchestrator.engine_server import TOKEN, EngineServer, packed, serving
from tests.orchestrator.toys import ToyEnv, make_config, run_orchestrator
from tests.support.fakes import FakeTrainer
from transport.client.client import BatchClient
from transport.errors import CodecError, TransportError
from transport.outbox.progress import PublishedWeights
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan
from transport.wire.weights import Canary

LENGTHS = (2, 4)


def logprob(version: int, length: int) -> float:
    """What "weights" of a version say after a prefix."""
    return -0.25 * (version + 1) - length / 64


def canary_of(version: int) -> Canary:
    """The trainer's."""
    return Canary(
        token_ids=EncodedTensor.of(np.array([5, 6, 7, 8], np.int32)),
        lengths=EncodedTensor.of(np.array(LENGTHS, np.int32)),
        logprobs=EncodedTensor.of(np.array([logprob(version, length) for length in LENGTHS], np.float32)),
    )


@dataclass
class CanaryServer(EngineServer):
    """Answers greedily with a log probability that its weights decide. One that `keeps` weights acknowledges updates,
    says the new version and digest everywhere, and goes on with the old weights."""

    keeps: bool = False
    is_busy: bool = False
    """Sends everybody away."""
    computes_with: int = 0

    async def apply(self, request: web.Request) -> web.Response:
        response = await super().apply(request)
        if not self.keeps:
            self.computes_with = self.engine.weights.version
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        ask = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        self.num_generate += 1
        if self.is_busy:
            return web.Response(status=429)
        if ask.temperature:
            return packed(await self.engine.generate(ask))
        value = logprob(self.computes_with, ask.token_ids.shape[0])
        return packed(
            GenerateReply(
                request_id=ask.request_id,
                token_ids=EncodedTensor.of(np.array([9], np.int32)),
                logprobs=EncodedTensor.of(np.array([value], np.float32)),
                finish_reason="length",
                versions=(VersionSpan(self.engine.weights.version, 0, 1),),
            )
        )


@asynccontextmanager
async def pool(*servers: CanaryServer) -> AsyncIterator[HttpEngine]:
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(serving(server))
        engine = HttpEngine(EnginesConfig(urls=tuple(server.url for server in servers), start_timeout_s=30), TOKEN)
        stack.push_async_callback(engine.close)
        await engine.start()
        await engine.served()
        yield engine


def published(version: int) -> PublishedWeights:
    return PublishedWeights(
        version=version, location=f"v{version}", digest=f"digest-{version}", canary=canary_of(version)
    )


async def give(engine: HttpEngine, check: CanaryCheck, version: int) -> None:
    """As the policy does: the read-back passes, then the canary is asked."""
    weights = published(version)
    await engine.apply_weights(weights.location, weights.version, weights.digest)
    await check.check(weights)


async def test_engines_that_compute_with_what_they_serve_pass() -> None:
    servers = CanaryServer(), CanaryServer()
    async with pool(*servers) as engine:
        check = CanaryCheck(engine, interval_steps=1, tolerance=0.01)
        for version in (1, 2, 3):
            await give(engine, check, version)
    assert [server.num_generate for server in servers] == [6, 6]


async def test_engine_that_answers_200_and_keeps_old_weights_is_found_and_named() -> None:
    honest, liar = CanaryServer(), CanaryServer()
    async with pool(honest, liar) as engine:
        check = CanaryCheck(engine, interval_steps=1, tolerance=0.01)
        await give(engine, check, 1)
        liar.keeps = True
        with pytest.raises(CanaryError) as caught:
            await give(engine, check, 2)
    message = str(caught.value)
    assert f"engine {liar.url} says that it serves version 2 (digest-2)" in message
    assert "of the canary are [-0.5312, -0.5625], the trainer's are [-0.7812, -0.8125]" in message
    assert honest.url not in message


async def test_difference_within_the_tolerance_is_rounding() -> None:
    async with pool(CanaryServer(keeps=True)) as engine:
        check = CanaryCheck(engine, interval_steps=1, tolerance=0.3)
        await give(engine, check, 1)  # 0.25 off
        with pytest.raises(CanaryError, match=r"largest difference is 0\.5"):
            await give(engine, check, 2)


@pytest.mark.parametrize(("interval_steps", "asked"), [(1, 5), (2, 3), (0, 0)])
async def test_canary_is_asked_at_its_interval(interval_steps: int, asked: int) -> None:
    server = CanaryServer()
    async with pool(server) as engine:
        check = CanaryCheck(engine, interval_steps=interval_steps, tolerance=0.01)
        for version in (1, 2, 3, 4, 5):
            await give(engine, check, version)
    assert server.num_generate == asked * len(canary_of(1).lengths.numpy())


async def test_canary_that_nobody_answered_is_asked_again_at_the_next_version() -> None:
    server = CanaryServer()
    async with pool(server) as engine:
        check = CanaryCheck(engine, interval_steps=100, tolerance=0.01)
        server.is_busy = True
        await give(engine, check, 1)
        server.is_busy, server.keeps = False, True
        with pytest.raises(CanaryError, match="version 2"):
            await give(engine, check, 2)


async def test_engine_without_a_model_and_trainer_without_a_canary_are_left_alone() -> None:
    scripted = CanaryCheck(ScriptedEngine(16, 0), interval_steps=1, tolerance=0.01)
    await scripted.check(published(1))
    await scripted.check(PublishedWeights(version=2, location="v2", digest="d"))


class Stopped(TransportError):
    """The test is over."""


class CanaryTrainer(FakeTrainer):
    """Announces each version with its canary, until it is told to stop."""

    is_over = False

    def train(self) -> None:
        client = BatchClient(self.endpoint, self.run_id, lost_timeout_s=60, heartbeat_s=0.2, on_wait=self._waits)
        try:
            with client:
                self._train(client)
        except Stopped:
            return

    def _waits(self, what: str) -> None:
        if self.is_over:
            raise Stopped(what)

    def _train(self, client: BatchClient) -> None:
        step = client.hello()
        while (manifest := client.manifest(step)) is not None:
            self.batches[step] = client.samples(manifest, range(manifest.num_samples))
            client.weights_published(step, f"weights/v{step}", f"digest-{step}", canary_of(step))
            client.trained(step)
            self._commit(client, step)
            step += 1


async def test_whole_run_ends_when_an_engine_keeps_old_weights(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        honest = await stack.enter_async_context(serving(CanaryServer()))
        liar = await stack.enter_async_context(serving(CanaryServer(keeps=True)))
        engines = {"urls": [honest.url, liar.url], "canary_interval_steps": 1, "canary_tolerance": 0.01}
        config = make_config(tmp_path, engines=engines | {"start_timeout_s": 30}, max_steps=6)
        engine = HttpEngine(config.engines, TOKEN)
        trainer = CanaryTrainer(config.server.endpoint)
        thread = threading.Thread(target=trainer.train, daemon=True)
        thread.start()
        try:
            with pytest.raises(BaseExceptionGroup) as caught:
                await run_orchestrator(config, engine, [ToyEnv(engine)])
        finally:
            trainer.is_over = True
            await asyncio.to_thread(thread.join, 60)
    error = find_service_error(caught.value)
    assert isinstance(error, CanaryError)
    assert re.search(rf"engine {re.escape(liar.url)} says that it serves version \d+", str(error))


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": EncodedTensor.of(np.array([2, 5], np.int32))},
        {"lengths": EncodedTensor.of(np.array([0, 4], np.int32))},
        {"logprobs": EncodedTensor.of(np.array([np.nan, 0], np.float32))},
        {"logprobs": EncodedTensor.of(np.zeros(3, np.float32))},
        {"token_ids": EncodedTensor.of(np.zeros(4, np.int64))},
        {"token_ids": EncodedTensor.of(np.zeros((2, 2), np.int32))},
    ],
)
def test_unsound_canary_is_refused(changes: dict[str, EncodedTensor]) -> None:
    sound = canary_of(1)
    fields = {"token_ids": sound.token_ids, "lengths": sound.lengths, "logprobs": sound.logprobs}
    with pytest.raises(CodecError):
        Canary(**(fields | changes)).check()
