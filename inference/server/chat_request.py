"""From an OpenAI chat request to jobs. Pure, but for the tokenizer."""

from collections.abc import Callable

import msgspec

from inference.engine import EngineLimits
from inference.errors import BadRequest
from inference.generation import Int32s, Job
from inference.requests import check_job, decode_body
from inference.server.chat_tokenizer import ChatTokenizer
from inference.server.chat_types import ChatRequest

MAX_CHOICES = 128
_decoder = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """The request in `body`. Raises `BadRequest`, also for fields that are known and not served."""
    request = decode_body(_decoder, body)
    _check_served(request)
    return request


def jobs_of(request: ChatRequest, prompt: Int32s, tokenizer: ChatTokenizer, limits: EngineLimits) -> list[Job]:
    """One job per choice. Choice `i` has seed `seed + i`. Raises `BadRequest`."""
    room = max(1, limits.max_model_len - len(prompt))
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    jobs = [
        Job(
            prompt=prompt,
            max_tokens=room if asked is None else asked,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=None if request.seed is None else request.seed + index,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            num_top_logprobs=request.top_logprobs or 0,
            should_stop=_stop_watch(stop_strings(request), tokenizer),
        )
        for index in range(1 if request.n is None else request.n)
    ]
    check_job(jobs[0], limits)
    return jobs


def plain_messages(request: ChatRequest) -> list[dict[str, object]]:
    """The messages with text parts joined. Raises `BadRequest` for anything but text."""
    if not request.messages:
        raise BadRequest("messages is empty")
    return [message | {"content": _text_of(message.get("content"))} for message in request.messages]


def stop_strings(request: ChatRequest) -> tuple[str, ...]:
    """The stop strings. Raises `BadRequest` for an empty one."""
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if "" in stops:
        raise BadRequest("a stop string is empty")
    return stops


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the first stop string."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def _check_served(request: ChatRequest) -> None:
    neutral: dict[str, tuple[object, ...]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "top_k": (-1, 0),
        "min_p": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "tools": ([],),
        "response_format": ({"type": "text"},),
    }
    for field, values in neutral.items():
        value = getattr(request, field)
        if value is not None and value not in values:
            raise BadRequest(f"{field} is not supported by this server")
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}, got {request.n}")
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs = true")


def _text_of(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest("message content must be text: this server has no images, audio or files")


def _stop_watch(stops: tuple[str, ...], tokenizer: ChatTokenizer) -> Callable[[Int32s], bool] | None:
    """Whether a stop string ends in the newest tokens. Every token is at least a byte, special ones aside."""
    if not stops:
        return None
    num_tail = max(len(stop.encode()) for stop in stops) + 8
    return lambda sampled: any(stop in tokenizer.decode(sampled[-num_tail:]) for stop in stops)
