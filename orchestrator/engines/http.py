"""`HttpEngine`: all engines of the run behind one `Engine`, over the HTTP contract of docs/contracts.md."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from orchestrator.config import EnginesConfig
from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.engines.replica import Replica, least_loaded
from orchestrator.engines.retry import TemporaryError, parse_retry_after, retrying
from orchestrator.engines.validation import check_reply
from transport.generation import (
    GENERATE_PATH,
    MSGPACK,
    WEIGHTS_PATH,
    ApplyWeights,
    GenerateReply,
    GenerateRequest,
    ServedWeights,
)

HEALTH_TIMEOUT_S = 5.0
HEALTH_POLL_S = 0.2
KEEPALIVE_S = 60.0
MAX_ERROR_CHARS = 500

_T = TypeVar("_T")
_MSGPACK_HEADERS = {"Content-Type": MSGPACK}
_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(GenerateReply)
_served_decoder = msgspec.json.Decoder(ServedWeights)


class _Health(msgspec.Struct, frozen=True):
    status: str
    vocab_size: int


_health_decoder = msgspec.json.Decoder(_Health)


class HttpEngine:
    """Implements `Engine`. Requests go to the replica with the least in flight; a retry may go to another one."""

    def __init__(self, config: EnginesConfig, admin_token: str | None = None) -> None:
        self._config = config
        self._replicas = [Replica(url.rstrip("/")) for url in config.urls]
        self._admin_headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._client: aiohttp.ClientSession | None = None
        self._vocab_size = 0

    @property
    def num_in_flight(self) -> int:
        """Requests that wait for an engine."""
        return sum(replica.num_in_flight for replica in self._replicas)

    async def start(self) -> None:
        """Wait until every engine is healthy, and learn the vocabulary."""
        if self._client is None:
            self._client = _new_client()
        await self._on_all(self._wait_healthy)
        sizes = {replica.vocab_size for replica in self._replicas}
        if len(sizes) > 1:
            raise EngineError(f"the engines serve models of different vocabularies: {sorted(sizes)}")
        self._vocab_size = sizes.pop()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample, with retries."""
        body = _encoder.encode(request)
        payload: bytes = await retrying(self._config.max_retries)(self._post_generate, request.request_id, body)
        try:
            reply = _reply_decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidResponse(f"reply to {request.request_id} does not decode: {error}") from error
        return check_reply(request, reply, self._vocab_size)

    async def apply_weights(self, manifest_path: str, version: int, digest: str) -> None:
        """Every engine loads the publish and is read back."""
        order = msgspec.json.encode(ApplyWeights(manifest_path=manifest_path, version=version))
        expected = ServedWeights(version=version, digest=digest)

        async def apply(replica: Replica) -> None:
            answered = await self._admin("POST", replica, order)
            served = await self._admin("GET", replica)
            if answered != expected or served != expected:
                raise EngineError(f"{replica.url} was told to serve {expected}, answered {answered}, serves {served}")

        await self._on_all(apply)

    async def served(self) -> ServedWeights:
        """What all engines agree on."""
        answers = await self._on_all(lambda replica: self._admin("GET", replica))
        if any(answer != answers[0] for answer in answers):
            pairs = zip(self._replicas, answers, strict=True)
            raise EngineError(f"the engines disagree: {[(replica.url, answer) for replica, answer in pairs]}")
        return answers[0]

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _post_generate(self, request_id: str, body: bytes) -> bytes:
        """One try. `TemporaryError` if another may succeed."""
        replica = least_loaded(self._replicas, time.monotonic())
        url, timeout = replica.url + GENERATE_PATH, self._config.request_timeout_s
        with replica.busy():
            try:
                payload = await self._exchange("POST", url, timeout, body, _MSGPACK_HEADERS)
            except TemporaryError as error:
                replica.failed(time.monotonic())
                raise TemporaryError(f"request {request_id}: {error}", error.retry_after_s) from error
        replica.succeeded()
        return payload

    async def _admin(self, method: str, replica: Replica, body: bytes | None = None) -> ServedWeights:
        headers = {**self._admin_headers, "Content-Type": "application/json"}
        payload = await self._exchange(method, replica.url + WEIGHTS_PATH, self._config.update_timeout_s, body, headers)
        return _decode(_served_decoder, payload, replica.url + WEIGHTS_PATH)

    async def _wait_healthy(self, replica: Replica) -> None:
        """Poll the health endpoint until it says `ok`; `EngineError` with the last problem at the deadline."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            try:
                health = await self._health(replica)
                problem = f"its status is {health.status!r}"
                if health.status == "ok":
                    replica.vocab_size = health.vocab_size
                    return
            except EngineError as error:
                problem = str(error)
            if time.monotonic() + HEALTH_POLL_S > deadline:
                raise EngineError(
                    f"engine {replica.url} is not healthy after {self._config.start_timeout_s:g} s: {problem}"
                )
            await asyncio.sleep(HEALTH_POLL_S)

    async def _health(self, replica: Replica) -> _Health:
        url, timeout = replica.url + "/health", min(HEALTH_TIMEOUT_S, self._config.start_timeout_s)
        return _decode(_health_decoder, await self._exchange("GET", url, timeout), url)

    async def _exchange(
        self,
        method: str,
        url: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Body of a 200. `TemporaryError` without an answer and for 429 and 5xx, `EngineError` for any other status."""
        if self._client is None:
            raise EngineError("the engine is closed or was not started")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._client.request(method, url, data=body, headers=headers, timeout=timeout) as response:
                payload = await response.read()
        except TimeoutError as error:
            raise TemporaryError(f"{url} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TemporaryError(f"{url} did not answer: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return payload
        message = f"{url} answered {response.status}: {payload[:MAX_ERROR_CHARS].decode(errors='replace')}"
        if response.status == 429 or response.status >= 500:
            raise TemporaryError(message, parse_retry_after(response.headers.get("Retry-After")))
        raise EngineError(message)

    async def _on_all(self, act: Callable[[Replica], Awaitable[_T]]) -> list[_T]:
        """`act` on every replica at once; all are waited for. Raises one `EngineError` with all their complaints."""
        results = await asyncio.gather(*(act(replica) for replica in self._replicas), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineError):
                raise result
        errors = [str(result) for result in results if isinstance(result, EngineError)]
        if errors:
            raise EngineError("; ".join(errors))
        return [result for result in results if not isinstance(result, BaseException)]


def _new_client() -> aiohttp.ClientSession:
    # The scheduler bounds the requests in flight; a second bound here would only hide the queue.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _decode(decoder: "msgspec.json.Decoder[_T]", payload: bytes, url: str) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise EngineError(f"{url} answered something else than the contract says: {error}") from error
