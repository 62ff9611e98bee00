"""From OpenAI's chat request to jobs, by the `ChatTokenizer` of the model."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
import msgspec
import numpy as np

from inference.api.arrays import Int32s
from inference.api.engine import EngineLimits
from inference.api.generation import Job
from inference.api.requests import check_job, decode_body
from inference.errors import BadRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`. Fields that would change the answer and are not served are refused."""

    messages: list[dict[str, object]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Extension: add `prompt_token_ids` to the reply and `token_ids` to each choice."""
    chat_template_kwargs: dict[str, object] | None = None
    """Extension: passed to the chat template."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[object] | None = None
    response_format: dict[str, object] | None = None


class ChatTokenizer:
    """Safe to use from the event loop and from the engine's thread. `missing` says why there is no chat."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", *, missing: str = "") -> None:
        self._lock = threading.Lock()  # fast tokenizers refuse to be used by two threads at once
        self._tokenizer = tokenizer
        self._missing = missing

    def encode_chat(self, messages: Sequence[Mapping[str, object]], template_kwargs: Mapping[str, object]) -> Int32s:
        """Tokens of the conversation, up to where the assistant speaks. Raises `BadRequest`."""
        tokenizer = self._usable()
        try:
            with self._lock:
                ids = tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=False, **template_kwargs
                )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from error
        if not isinstance(ids, list):  # an option of the tokenizer, not of the template: `tokenize`, `return_tensors`
            raise BadRequest("chat_template_kwargs must be variables of the chat template")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Int32s) -> str:
        """Text of `token_ids`, without special tokens."""
        tokenizer = self._usable()
        with self._lock:
            text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, also of a special one."""
        tokenizer = self._usable()
        with self._lock:
            text: str = tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _usable(self) -> "PreTrainedTokenizerBase":
        if self._tokenizer is None or self._missing:
            raise BadRequest(f"chat is not possible: {self._missing}")
        return self._tokenizer


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
