"""An engine server whose answers depend on its weights, and which may lie about them, over real HTTP."""

from dataclasses import dataclass

import msgspec
import numpy as np
from aiohttp import web

from tests.orchestrator.edge.engine_server import EngineServer, packed
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor
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
