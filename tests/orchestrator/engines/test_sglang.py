"""The `sglang` backend against a scripted server with its documented routes. The real one was not run here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from chat.tokenizer import Tokenizer
from orchestrator.engines.factory import make_engine
from orchestrator.engines.protocol import Engine, EngineError
from tests.orchestrator.toys import make_config
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest, ServedWeights
from transport.wire.sample import EncodedTensor, VersionSpan


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


@asynccontextmanager
async def engine_for(server: SglangServer, tokenizer: Tokenizer, folder: Path) -> AsyncIterator[Engine]:
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("open-sesame")
    engines = {"backend": "sglang", "urls": [server.url], "start_timeout_s": 30, "max_retries": 0}
    engine = make_engine(make_config(folder, engines=engines, admin_token_file=token_file), tokenizer)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def ask(max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="env/0/0#1/0",
        token_ids=EncodedTensor.of(np.array([4, 5, 6], np.int32)),
        max_tokens=max_tokens,
        temperature=0.7,
        seed=2**40 + 3,
    )


async def test_tokens_go_in_and_come_out_with_their_log_probabilities(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with sglang(SglangServer()) as server, engine_for(server, tokenizer, tmp_path) as engine:
        reply = await engine.generate(ask())
        cut = await engine.generate(ask(max_tokens=2))
    assert reply.token_ids.numpy().tolist() == [7, 8, 2]
    assert reply.logprobs.numpy().tolist() == [-0.5] * 3
    assert (reply.finish_reason, cut.finish_reason) == ("stop", "length")
    assert reply.versions == (VersionSpan(0, 0, 3),)
    body = server.asked[0]
    assert (body["input_ids"], body["return_logprob"]) == ([4, 5, 6], True)
    assert body["sampling_params"]["temperature"] == 0.7
    assert body["sampling_params"]["max_new_tokens"] == 8
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**31
    assert server.keys == {"Bearer open-sesame"}


async def test_weights_are_loaded_from_the_folder_and_read_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with sglang(SglangServer()) as server, engine_for(server, tokenizer, tmp_path) as engine:
        assert (await engine.served()).version == 0
        await engine.apply_weights("/runs/x/weights/v00000003/manifest.json", 3, "abc")
        assert await engine.served() == ServedWeights(version=3, digest="abc")
        assert (await engine.generate(ask())).versions == (VersionSpan(3, 0, 3),)
    assert [update["model_path"] for update in server.updates] == ["/runs/x/weights/v00000003"]
    assert server.updates[0]["flush_cache"] is True


async def test_update_waits_for_requests_in_flight_which_keep_their_version(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with sglang(SglangServer(hold=asyncio.Event())) as server, engine_for(server, tokenizer, tmp_path) as engine:
        assert server.hold is not None
        running = asyncio.create_task(engine.generate(ask()))
        await until_async(lambda: server.asked, 30)
        update = asyncio.create_task(engine.apply_weights("/w/v00000001/manifest.json", 1, "abc"))
        await until_async(lambda: server.updates, 30)
        server.hold.set()
        assert (await running).versions == (VersionSpan(0, 0, 3),)
        await update


async def test_refused_update_names_the_server_and_its_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with sglang(SglangServer(refuses=True)) as server, engine_for(server, tokenizer, tmp_path) as engine:
        with pytest.raises(EngineError, match="no such folder"):
            await engine.apply_weights("/w/v00000001/manifest.json", 1, "abc")
        with pytest.raises(EngineError, match="from files only"):
            await engine.apply_weights("tcp://10.0.0.1:5", 1, "abc")
        assert (await engine.generate(ask())).versions == (VersionSpan(0, 0, 3),)


async def test_restarted_server_is_found_out_by_the_version_of_its_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with sglang(SglangServer()) as server, engine_for(server, tokenizer, tmp_path) as engine:
        await engine.apply_weights("/w/v00000002/manifest.json", 2, "abc")
        server.label = "default"
        with pytest.raises(EngineError, match="has lost version 2"):
            await engine.generate(ask())
        assert not engine.availability.is_open
