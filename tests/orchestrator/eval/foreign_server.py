"""A scripted OpenAI-compatible server that is none of ours, over real HTTP."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class ForeignServer:
    """Answers with `says(body)`; an exception in it is a 500."""

    says: Callable[[dict[str, Any]], str]
    counts_tokens: bool = True
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": "stranger-7b", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        text = self.says(body)
        is_chat = request.path.endswith("/chat/completions")
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 3}} if self.counts_tokens else {}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], **usage})


@asynccontextmanager
async def foreign(server: ForeignServer) -> AsyncIterator[ForeignServer]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
