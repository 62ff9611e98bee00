"""A real HTTP server that speaks the inference contract, and misbehaves on request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from orchestrator.engines.scripted import ScriptedEngine
from transport.wire.generation import (
    GENERATE_PATH,
    MSGPACK,
    SCORE_PATH,
    WEIGHTS_PATH,
    ApplyWeights,
    GenerateRequest,
    ScoreReply,
    ScoreRequest,
    ServedWeights,
)

VOCAB_SIZE = 64
EOS = 2
TOKEN = "secret-token"
Misbehave = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class EngineServer:
    """`misbehaviours` are used up one per generate request, then the server behaves."""

    url: str = ""
    host: str = "127.0.0.1"
    misbehaviours: list[Misbehave] = field(default_factory=list)
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(VOCAB_SIZE, EOS))
    num_generate: int = 0
    num_loading: int = 0
    """Health checks that still answer `loading`."""
    vocab_size: int = VOCAB_SIZE
    lies_about_weights: bool = False
    asked_versions: list[int] = field(default_factory=list)
    """Versions that it was told to load."""
    sampled_versions: list[int] = field(default_factory=list)
    """What it served when a request came in."""

    scores: Callable[[ScoreRequest], ScoreReply] | None = None
    """How it scores; without it there is no such route."""
    num_scoring: int = 0
    most_scoring: int = 0
    """The most scoring requests that ran at the same time."""
    scored: list[ScoreRequest] = field(default_factory=list)
    runner: web.AppRunner | None = None

    async def open(self) -> None:
        """Serve on a free loopback port, and on the same one if it was open before."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post(GENERATE_PATH, self.generate)
        if self.scores is not None:
            app.router.add_post(SCORE_PATH, self.score)
        app.router.add_post(WEIGHTS_PATH, self.apply)
        app.router.add_get(WEIGHTS_PATH, self.served)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        port = int(self.url.rsplit(":", 1)[1]) if self.url else 0
        await web.TCPSite(self.runner, self.host, port, reuse_address=True).start()
        self.url = f"http://{self.host}:{self.runner.addresses[0][1]}"

    async def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        runner, self.runner = self.runner, None
        if runner is not None:
            await runner.cleanup()

    async def health(self, request: web.Request) -> web.Response:
        if self.num_loading:
            self.num_loading -= 1
            return web.json_response({"status": "loading", "vocab_size": 0}, status=503)
        return web.json_response({"status": "ok", "engine": "scripted", "model": "tiny", "vocab_size": self.vocab_size})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.num_generate += 1
        self.sampled_versions.append(self.engine.weights.version)
        if self.misbehaviours:
            return await self.misbehaviours.pop(0)(request)
        ask = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        return packed(await self.engine.generate(ask))

    async def score(self, request: web.Request) -> web.StreamResponse:
        self.num_scoring += 1
        self.most_scoring = max(self.most_scoring, self.num_scoring)
        try:
            ask = msgspec.msgpack.decode(await request.read(), type=ScoreRequest)
            await asyncio.sleep(0)
            if self.misbehaviours:
                return await self.misbehaviours.pop(0)(request)
            self.scored.append(ask)
            assert self.scores is not None
            return packed(self.scores(ask))
        finally:
            self.num_scoring -= 1

    async def apply(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "no", "type": "auth"}}, status=403)
        order = msgspec.json.decode(await request.read(), type=ApplyWeights)
        self.asked_versions.append(order.version)
        if order.location == "corrupt":
            return web.json_response({"error": {"message": "hash mismatch", "type": "weights"}}, status=409)
        if not self.lies_about_weights:
            self.engine.weights = ServedWeights(version=order.version, digest=f"digest-{order.version}")
        times = {"transfer_s": float(order.version), "pause_s": 0.0, "apply_s": 0.5}
        return web.json_response({"version": order.version, "digest": f"digest-{order.version}", "times": times})

    async def served(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.engine.weights), content_type="application/json")


def packed(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type=MSGPACK)


@asynccontextmanager
async def serving(server: EngineServer) -> AsyncIterator[EngineServer]:
    """Serve on a free loopback port."""
    await server.open()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def dead(server: EngineServer, served_again: ServedWeights | None = None) -> AsyncIterator[None]:
    """Port and connections of the server are closed while the block lasts; then it is back, with `served_again`."""
    await server.close()
    yield
    if served_again is not None:
        server.engine.weights = served_again
    await server.open()
