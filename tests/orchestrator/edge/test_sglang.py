"""The `sglang` backend against a scripted server with SGLang's documented routes. The real one was not run here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from chat.tokenizer import Tokenizer
from orchestrator.engines.factory import make_engine
from orchestrator.engines.protocol import Engine, EngineError
from tests.orchestrator.core.toys import make_config
from tests.orchestrator.edge.sglang_server import SglangServer, sglang
from tests.support.waiting import until_async
from transport.wire.generation import GenerateRequest, ServedWeights
from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor


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
