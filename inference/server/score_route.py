"""`POST /inference/tandem/score`: log probabilities of given tokens."""

import asyncio

from aiohttp import web

from inference.errors import DeadlineExceeded
from inference.generation import ScoreJob, Scores
from inference.requests import SCORE, decode_body
from inference.scoring import score_job_of, score_reply_of
from inference.server.state import STATE, ServerState
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK


async def score(request: web.Request) -> web.Response:
    """Decode, score, encode."""
    state = request.app[STATE]
    asked = decode_body(SCORE, await request.read())
    scores = await run_score(state, score_job_of(asked, state.engine.limits))
    return web.Response(body=encode(score_reply_of(asked, scores)), content_type=MSGPACK)


async def run_score(state: ServerState, job: ScoreJob) -> Scores:
    """Score `job` within the server's deadline. Raises `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(state.request_timeout_s):
            return await state.engine.score(job)
    except TimeoutError as error:
        raise DeadlineExceeded(f"not scored within {state.request_timeout_s:g} s; the request was dropped") from error
