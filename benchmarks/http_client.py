"""CPU time of one engine request: our `HttpEngine` beside the OpenAI SDK, against the same server on loopback.

    python -m benchmarks.http_client [--out benchmarks/results/http_client.json]

The server is another process with ready-made answers of `NUM_TOKENS` tokens, so what is measured is the client: CPU
milliseconds of this process per request, with `NUM_CONCURRENT` requests in flight. `http_engine` returns checked token
ids and log probabilities; `openai` asks for log probabilities, which training needs; `openai_text` for the text alone.
"""

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import numpy as np
import openai
import uvloop
from aiohttp import web
from openai.types.chat import ChatCompletionMessageParam

from orchestrator.engines.config import EnginesConfig
from orchestrator.engines.http import HttpEngine
from transport.generation import GENERATE_PATH, MSGPACK, GenerateReply, GenerateRequest
from transport.sample import VersionSpan
from transport.tensor import EncodedTensor

RESULTS = Path(__file__).parent / "results" / "http_client.json"
NUM_CONCURRENT = 512
NUM_TOKENS, VOCAB_SIZE = 128, 32_000
SERVE = "serve"
Request = Callable[[int], Awaitable[object]]


async def serve() -> None:
    """Answer on a free port, which is printed first; until killed."""
    runner = web.AppRunner(_app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2 * NUM_CONCURRENT).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def _app() -> web.Application:
    rng = np.random.default_rng(0)
    token_ids = EncodedTensor.of(rng.integers(0, VOCAB_SIZE, NUM_TOKENS).astype(np.int32))
    logprobs = EncodedTensor.of(-rng.exponential(size=NUM_TOKENS).astype(np.float32))
    spans = (VersionSpan(0, 0, NUM_TOKENS),)

    async def generate(request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        reply = GenerateReply(
            request_id=asked.request_id, token_ids=token_ids, logprobs=logprobs, finish_reason="stop", versions=spans
        )
        return web.Response(body=msgspec.msgpack.encode(reply), content_type=MSGPACK)

    async def chat(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        return web.Response(body=with_logprobs if asked.get("logprobs") else text_only, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "vocab_size": VOCAB_SIZE})

    with_logprobs, text_only = _chat_body(logprobs.numpy().tolist()), _chat_body(None)
    app = web.Application()
    app.add_routes(
        [web.post(GENERATE_PATH, generate), web.post("/v1/chat/completions", chat), web.get("/health", health)]
    )
    return app


def _chat_body(logprobs: list[float] | None) -> bytes:
    words = [f" w{index}" for index in range(NUM_TOKENS)]
    content = [
        {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
        for word, logprob in zip(words, logprobs or (), strict=False)
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "".join(words)},
        "logprobs": {"content": content} if content else None,
    }
    usage = {"prompt_tokens": 16, "completion_tokens": NUM_TOKENS, "total_tokens": 16 + NUM_TOKENS}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    return msgspec.json.encode(body)


async def cpu_ms(request: Request, num_requests: int) -> float:
    """Milliseconds per request, connections being open already."""
    places = asyncio.Semaphore(NUM_CONCURRENT)

    async def one(index: int) -> None:
        async with places:
            await request(index)

    await asyncio.gather(*(one(index) for index in range(NUM_CONCURRENT)))
    started = time.process_time()
    await asyncio.gather(*(one(index) for index in range(num_requests)))
    return 1000 * (time.process_time() - started) / num_requests


async def measure(url: str, num_requests: int, repeats: int) -> dict[str, float]:
    """The best of interleaved repeats, by client."""
    prompt = EncodedTensor.of(np.arange(16, dtype=np.int32))
    engine = HttpEngine(EnginesConfig(urls=(url,), request_timeout_s=300.0))
    await engine.start()
    sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300.0, http_client=_unbounded())
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say something"}]

    async def ours(index: int) -> object:
        return await engine.generate(
            GenerateRequest(request_id=str(index), token_ids=prompt, max_tokens=NUM_TOKENS, temperature=1.0, seed=index)
        )

    async def theirs(index: int, logprobs: bool | None = True) -> object:
        return await sdk.chat.completions.create(
            model="m", messages=messages, max_tokens=NUM_TOKENS, temperature=1.0, seed=index, logprobs=logprobs
        )

    clients: dict[str, Request] = {
        "http_engine": ours,
        "openai": theirs,
        "openai_text": lambda index: theirs(index, None),
    }
    figures = {name: [await cpu_ms(request, num_requests) for _ in range(repeats)] for name, request in clients.items()}
    await engine.close()
    await sdk.close()
    return {name: min(values) for name, values in figures.items()}


def _unbounded() -> openai.DefaultAsyncHttpxClient:
    """The SDK's own defaults allow 1,000 connections but keep 100: it shall not reconnect either."""
    return openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))


def main() -> None:
    """Measure, print, and keep the figures."""
    if sys.argv[1:] == [SERVE]:
        return uvloop.run(serve())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with subprocess.Popen([sys.executable, __file__, SERVE], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            figures = uvloop.run(measure(url, arguments.requests, arguments.repeats))
        finally:
            server.kill()
    results = {
        "python": platform.python_version(),
        "openai": openai.__version__,
        "concurrent": NUM_CONCURRENT,
        "completion_tokens": NUM_TOKENS,
        "cpu_ms_per_request": figures,
        "times_cheaper_than_openai": figures["openai"] / figures["http_engine"],
    }
    text = json.dumps(results, indent=2)
    print(text)
    arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
