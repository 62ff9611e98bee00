"""`EngineClient`: the HTTP contract of one engine (docs/contracts.md). Calls have deadlines; none is retried here."""

from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec

from orchestrator.engines.exchange import decoded, exchange
from orchestrator.engines.load import EngineLoad
from orchestrator.engines.protocol import EngineError
from orchestrator.engines.uploads import Uploads
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
        """How busy it is."""
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
        """See `ReplicaClient`."""
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
