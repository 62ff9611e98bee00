"""`POST /inference/tandem/generate`: token in, token out."""

import asyncio

from aiohttp import web

from inference.errors import DeadlineExceeded
from inference.generation import Completion, Job
from inference.requests import GENERATE, decode_body, job_of, reply_of
from inference.server.state import STATE, ServerState
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK


async def generate(request: web.Request) -> web.Response:
    """Decode, run, encode. A client that goes away cancels this handler, which frees the slot."""
    state = request.app[STATE]
    asked = decode_body(GENERATE, await request.read())
    completion = await run_job(state, job_of(asked, state.engine.limits))
    return web.Response(body=encode(reply_of(asked, completion)), content_type=MSGPACK)


async def run_job(state: ServerState, job: Job) -> Completion:
    """Run `job` within the server's deadline. Raises `DeadlineExceeded`; the slot is free then."""
    try:
        async with asyncio.timeout(state.request_timeout_s):
            return await state.engine.generate(job)
    except TimeoutError as error:
        raise DeadlineExceeded(f"not finished within {state.request_timeout_s:g} s; the request was dropped") from error
