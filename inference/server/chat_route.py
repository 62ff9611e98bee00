"""`POST /v1/chat/completions`, OpenAI's shape, streamed or whole."""

import asyncio
import time
import uuid
from typing import cast

from aiohttp import web

from inference.api.chat_reply import Json, choice_of, events_of, usage_of
from inference.api.chat_request import ChatRequest, decode_chat, jobs_of, plain_messages
from inference.api.generation import Completion, Job
from inference.api.handlers import json_answer
from inference.errors import InferenceError
from inference.server.routes import STATE, ServerState, read_body, response_of


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation. A streamed answer comes in one piece per choice, when all are complete."""
    state = request.app[STATE]
    asked = decode_chat(await read_body(request))
    state.check_model(asked.model)
    prompt = state.tokenizer.encode_chat(plain_messages(asked), asked.chat_template_kwargs or {})
    jobs = jobs_of(asked, prompt, state.tokenizer, state.engine.limits)
    reply = _reply(state, asked, jobs[0], await _run_all(state, jobs))
    return await _stream(request, asked, reply) if asked.stream else response_of(json_answer(reply))


async def _run_all(state: ServerState, jobs: list[Job]) -> list[Completion]:
    """All or nothing: when one choice fails, the others are cancelled and the first failure is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(state.handlers.run_job(job)) for job in jobs]
    except* InferenceError as errors:
        raise cast(InferenceError, errors.exceptions[0]) from None
    return [task.result() for task in tasks]


def _reply(state: ServerState, asked: ChatRequest, job: Job, completions: list[Completion]) -> Json:
    stop_ids = state.engine.eos_token_ids | job.stop_token_ids
    choices = [
        choice_of(index, asked, completion, state.tokenizer, stop_ids) for index, completion in enumerate(completions)
    ]
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": state.model_names[0],
        "choices": choices,
        "usage": usage_of(job.prompt, completions),
        "object": "chat.completion",
        "prompt_token_ids": job.prompt.tolist() if asked.return_token_ids else None,
    }


async def _stream(request: web.Request, asked: ChatRequest, reply: Json) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    include_usage = asked.stream_options is not None and asked.stream_options.include_usage
    for event in events_of(reply, include_usage=include_usage):
        await response.write(event)
    await response.write_eof()
    return response
