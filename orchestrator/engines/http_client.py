"""`EngineClient`: the HTTP contract of one engine (docs/contracts.md), one exchange, and when it is tried again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_fixed,
)

from orchestrator.engines.protocol import EngineError, EngineLoad, InvalidResponse
from transport.backoff import Backoff
from transport.wire.generation import (
    GENERATE_PATH,
    MSGPACK,
    SCORE_PATH,
    WEIGHTS_PATH,
    AppliedWeights,
    ApplyWeights,
    GenerateReply,
    GenerateRequest,
    ScoreReply,
    ScoreRequest,
    ServedWeights,
)

BACKOFF = Backoff(0.2, 10.0, jitter=(0.0, 1.0))
POLL_S = 0.2

_T = TypeVar("_T")


class TemporaryError(EngineError):
    """The same request may succeed later or elsewhere."""

    def __init__(self, message: str, retry_after_s: float | None = None, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """What the engine asked for, if it did."""
        self.is_busy = is_busy
        """The engine is well and has too much to do: no reason to doubt it."""


def retrying(max_retries: int) -> AsyncRetrying:
    """Try again on `TemporaryError`; raises the last one. One object per call: it holds the call's state."""
    return AsyncRetrying(
        stop=stop_after_attempt(max_retries + 1),
        retry=retry_if_exception_type(TemporaryError),
        wait=wait_s,
        reraise=True,
    )


async def when_ready(act: Callable[[], Awaitable[_T]], timeout_s: float, what: str) -> _T:
    """What `act` returns, once it raises no `EngineError` any more; at the deadline an `EngineError` with the last."""
    polling = AsyncRetrying(
        stop=stop_before_delay(timeout_s),
        retry=retry_if_exception_type(EngineError),
        wait=wait_fixed(POLL_S),
        reraise=True,
    )

    async def once() -> _T:  # tenacity awaits only what is declared `async`
        return await act()

    try:
        return await polling(once)
    except EngineError as error:
        raise EngineError(f"{what} is not ready after {timeout_s:g} s: {error}") from error


def parse_retry_after(value: str | None) -> float | None:
    """Seconds in a `Retry-After` header; its date form is ignored, since clocks differ."""
    try:
        seconds = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def wait_s(state: RetryCallState) -> float:
    """Seconds before the next try, with jitter: clients that failed together are spread. Never less than the engine
    asked for, up to the longest pause."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, TemporaryError) and error.retry_after_s is not None:
        return min(error.retry_after_s + BACKOFF.pause_s(1), BACKOFF.longest_s)
    return BACKOFF.pause_s(state.attempt_number)


MAX_ERROR_CHARS = 500
NOT_IMPLEMENTED = 501
"""The one answer above 500 that will not change."""


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    timeout_s: float,
    body: bytes | AsyncIterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Body of a 200. `TemporaryError` without an answer and for 429 and 5xx but 501, `EngineError` elsewhere."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url, data=body, headers=headers, timeout=timeout) as response:
            payload = await response.read()
    except TimeoutError as error:
        raise TemporaryError(f"{url} did not answer within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TemporaryError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    if response.status == 200:
        return payload
    message = f"{url} answered {response.status}: {payload[:MAX_ERROR_CHARS].decode(errors='replace')}"
    if response.status == 429 or (response.status >= 500 and response.status != NOT_IMPLEMENTED):
        retry_after_s = parse_retry_after(response.headers.get("Retry-After"))
        raise TemporaryError(message, retry_after_s, is_busy=response.status == 429)
    raise EngineError(message)


def decoded(decoder: "msgspec.json.Decoder[_T] | msgspec.msgpack.Decoder[_T]", payload: bytes, what: str) -> _T:
    """What `payload` says. Raises `InvalidResponse` that names `what` if it is something else than was agreed."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidResponse(f"{what} does not decode: {error}") from error


MAX_UPLOADS = 4
"""Requests with images that are sent at the same time."""

_encoder = msgspec.msgpack.Encoder()


class Uploads:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._gate = asyncio.Semaphore(MAX_UPLOADS)

    def body(self, request: GenerateRequest) -> bytes | AsyncIterator[bytes]:
        """The body of one try."""
        return self._stream(request) if request.mm_kwargs else _encoder.encode(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[bytes]:
        async with self._gate:
            yield _encoder.encode(request)


HEALTH_TIMEOUT_S = 3.0
KEEPALIVE_S = 60.0

_MSGPACK_HEADERS = {"Content-Type": MSGPACK}
_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(GenerateReply)
_score_decoder = msgspec.msgpack.Decoder(ScoreReply)
_served_decoder = msgspec.json.Decoder(ServedWeights)
_applied_decoder = msgspec.json.Decoder(AppliedWeights)


class EngineHealth(msgspec.Struct, frozen=True):
    """What an engine's health endpoint says, as far as it matters here."""

    status: str
    vocab_size: int
    model: str = ""
    running: int = 0
    waiting: int = 0
    max_batch_size: int = 0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.running, self.waiting, self.max_batch_size)


_health_decoder = msgspec.json.Decoder(EngineHealth)


def new_session() -> aiohttp.ClientSession:
    """Connections to all engines of the run."""
    # The scheduler bounds the requests in flight; a second bound here would only hide the queue.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class EngineClient:
    """Talks to `url`. Raises `TemporaryError` where the same call may succeed later, `EngineError` elsewhere."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_token: str | None) -> None:
        self.url = url
        self._session = session
        self._uploads = Uploads()
        authorization = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._admin_headers = {**authorization, "Content-Type": "application/json"}

    async def score(self, request: ScoreRequest, timeout_s: float) -> ScoreReply:
        """The engine's reply, as it is. `InvalidResponse` if it does not decode."""
        body = _encoder.encode(request)
        payload = await self._exchange("POST", SCORE_PATH, timeout_s, body, _MSGPACK_HEADERS)
        return decoded(_score_decoder, payload, f"the reply to {request.request_id}")

    async def sample(self, request: GenerateRequest, timeout_s: float) -> GenerateReply:
        body = self._uploads.body(request)
        payload = await self._exchange("POST", GENERATE_PATH, timeout_s, body, _MSGPACK_HEADERS)
        return decoded(_reply_decoder, payload, f"the reply to {request.request_id}")

    async def apply_weights(self, order: ApplyWeights, digest: str, timeout_s: float) -> AppliedWeights:
        """See `ReplicaClient`. The engine computes the digest itself."""
        payload = await self._admin("POST", timeout_s, msgspec.json.encode(order))
        return decoded(_applied_decoder, payload, f"the answer of {self.url}{WEIGHTS_PATH}")

    async def served_weights(self, timeout_s: float) -> ServedWeights:
        """What the engine says it serves."""
        payload = await self._admin("GET", min(timeout_s, HEALTH_TIMEOUT_S))
        return decoded(_served_decoder, payload, f"the answer of {self.url}{WEIGHTS_PATH}")

    async def health(self) -> EngineHealth:
        """Raises `EngineError`, with what the engine says, while it is not ready."""
        payload = await self._exchange("GET", "/health", HEALTH_TIMEOUT_S)
        health = decoded(_health_decoder, payload, f"the answer of {self.url}/health")
        if health.status != "ok":
            raise EngineError(f"the status of {self.url} is {health.status!r}")
        return health

    async def _admin(self, method: str, timeout_s: float, body: bytes | None = None) -> bytes:
        return await self._exchange(method, WEIGHTS_PATH, timeout_s, body, self._admin_headers)

    async def _exchange(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: "bytes | AsyncIterator[bytes] | None" = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        return await exchange(self._session, method, self.url + path, timeout_s, body, headers)
