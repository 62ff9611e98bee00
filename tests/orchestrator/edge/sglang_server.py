"""A scripted server with the documented routes of SGLang's native API, over real HTTP. No model is behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class SglangServer:
    """Answers every prompt with the same three tokens. An update waits for the requests in flight, as SGLang's does."""

    url: str = ""
    label: str = "default"
    model_path: str = "/models/base"
    refuses: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    logprob: float = -0.5
    hold: asyncio.Event | None = None
    """If set, generations wait for it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        info = {"model_path": self.model_path, "tokenizer_path": "t", "is_generation": True}
        return web.json_response(info | {"weight_version": self.label})

    async def generate(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json()
        self.asked.append(body)
        async with self.lock:
            if self.hold is not None:
                await self.hold.wait()
            ids = [7, 8, 2][: body["sampling_params"]["max_new_tokens"]]
            meta = {
                "id": body["rid"],
                "finish_reason": {"type": "stop" if ids[-1] == 2 else "length", "matched": 2},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "output_token_logprobs": [[self.logprob, token, None] for token in ids],
                "weight_version": self.label,
            }
        return web.json_response({"text": "x", "output_ids": ids, "meta_info": meta})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.updates.append(body)
        if self.refuses:
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        async with self.lock:
            self.model_path, self.label = body["model_path"], body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})


@asynccontextmanager
async def sglang(server: SglangServer) -> AsyncIterator[SglangServer]:
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_get("/get_model_info", server.model_info)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/update_weights_from_disk", server.update)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
