"""`OpenAIModel`: any OpenAI-compatible server as a `ChatModel`. Text in, text out: no tokens, no weight updates."""

import asyncio
import os
from collections.abc import Sequence

import aiohttp
import msgspec

from chat.errors import ChatTemplateError
from chat.tokenizer import Tokenizer
from orchestrator.config.algorithm import TeacherConfig
from orchestrator.config.engines import EnginesConfig
from orchestrator.engines.http_client import HEALTH_TIMEOUT_S, decoded, exchange, new_session, retrying, when_ready
from orchestrator.engines.protocol import ChatAsk, ChatReply, EngineError, InvalidResponse
from runtime.errors import PeerLostError, UserError


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    """Of either API: `message` of chat, `text` of completions."""

    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ModelName(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_ModelName]


_completion_decoder = msgspec.json.Decoder(_Completion)
_models_decoder = msgspec.json.Decoder(_Models)


class OpenAIModel:
    """Implements `ChatModel`. Requests go to the server with the least in flight; a retry may go to another one."""

    def __init__(
        self,
        urls: Sequence[str],
        config: EnginesConfig | TeacherConfig,
        tokenizer: Tokenizer | None = None,
        name: str = "the OpenAI-compatible server",
    ) -> None:
        """`tokenizer` has the chat template, which `api = "completions"` needs; `name` is for people."""
        if config.openai.api == "completions" and tokenizer is None:
            raise UserError("openai.api = 'completions' needs model.path: the chat template is applied here")
        self._in_flight = {base_url(url): 0 for url in urls}
        self._config = config
        self._template = tokenizer
        self._name = name
        self._headers = {"Content-Type": "application/json", **_authorization(config.openai.api_key_var)}
        self._session: aiohttp.ClientSession | None = None
        self.model = config.openai.model or ""
        """Name of the model; known after `start`."""

    def __str__(self) -> str:
        return f"{self._name} at {', '.join(self._in_flight)}"

    @property
    def urls(self) -> tuple[str, ...]:
        """Who has to answer, for `Health.waiting`."""
        return tuple(self._in_flight)

    async def start(self) -> None:
        """Wait until every server lists its models. Raises `PeerLostError` at the deadline."""
        self._session = new_session()
        try:
            listed = await asyncio.gather(*(self._wait_models(url) for url in self._in_flight))
        except EngineError as error:
            raise PeerLostError(f"{self} does not answer: {error}") from error
        self.model = self.model or next((name for names in listed for name in names), "")
        if not self.model:
            raise PeerLostError(f"{self} lists no model; set openai.model")

    async def chat(self, ask: ChatAsk) -> ChatReply:
        """See `ChatModel`. Tried again where that may help."""
        body = msgspec.json.encode(self._body(ask))
        payload: bytes = await retrying(self._config.max_retries)(self._post, body)
        return _reply(ask, payload)

    async def close(self) -> None:
        """Release connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _body(self, ask: ChatAsk) -> dict[str, object]:
        shared = {
            "model": self.model,
            "temperature": ask.temperature,
            "seed": ask.seed,
            self._config.openai.token_limit_key: ask.max_tokens,
        }
        if self._config.openai.api == "chat":
            return {**shared, "messages": ask.messages}
        assert self._template is not None, "checked when it was made"
        try:
            return {**shared, "prompt": self._template.render(ask.messages)}
        except ChatTemplateError as error:
            raise InvalidResponse(f"{ask.request_id}: {error}") from error

    async def _post(self, body: bytes) -> bytes:
        url = min(self._in_flight, key=lambda one: self._in_flight[one])
        path = "/chat/completions" if self._config.openai.api == "chat" else "/completions"
        self._in_flight[url] += 1
        try:
            return await exchange(
                self._opened(), "POST", url + path, self._config.request_timeout_s, body, headers=self._headers
            )
        finally:
            self._in_flight[url] -= 1

    async def _wait_models(self, url: str) -> list[str]:
        async def ask() -> _Models:
            answer = await exchange(self._opened(), "GET", f"{url}/models", HEALTH_TIMEOUT_S, headers=self._headers)
            return decoded(_models_decoder, answer, f"the answer of {url}/models")

        return [model.id for model in (await when_ready(ask, self._config.start_timeout_s, url)).data]

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineError(f"{self} is closed or was not started")
        return self._session


def base_url(url: str) -> str:
    """With `/v1` at its end, as OpenAI's clients want it, whether the user wrote it or not."""
    plain = url.rstrip("/")
    return plain if plain.endswith("/v1") else f"{plain}/v1"


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise UserError(f"openai.api_key_var names the environment variable {variable}, which is not set")
    return {"Authorization": f"Bearer {key}"}


def _reply(ask: ChatAsk, payload: bytes) -> ChatReply:
    completion = decoded(_completion_decoder, payload, f"the reply to {ask.request_id}")
    if len(completion.choices) != 1:
        raise InvalidResponse(f"the reply to {ask.request_id} has {len(completion.choices)} choices, not 1")
    choice, usage = completion.choices[0], completion.usage or _Usage()
    text = (choice.message.content if choice.message is not None else choice.text) or ""
    return ChatReply(
        text=text,
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        num_prompt_tokens=usage.prompt_tokens,
        # A server that does not count: words, and at least the end of the turn.
        num_sampled_tokens=usage.completion_tokens or len(text.split()) + 1,
    )
