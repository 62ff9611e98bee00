"""`Teacher`: a frozen model behind one inference server of ours. It generates (`sft`) or scores (`opd`).

At most `max_concurrency` scoring requests run at the same time, each in the task of the rollout that needs it: the loop
that schedules never waits for a teacher.
"""

import asyncio
import time

import aiohttp
import msgspec
import numpy as np
from tenacity import AsyncRetrying

from orchestrator.algorithms.config import TeacherConfig
from orchestrator.engines.http_client import EngineClient, EngineHealth, new_session
from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.engines.retry import TemporaryError, retrying
from orchestrator.engines.validation import LOGPROB_SLACK, check_reply
from orchestrator.rollout import Floats, Int32s
from runtime.errors import PeerLostError, UserError
from transport.errors import CodecError
from transport.generation import GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.tensor import EncodedTensor

HEALTH_POLL_S = 0.2

_encoder = msgspec.msgpack.Encoder()
_score_decoder = msgspec.msgpack.Decoder(ScoreReply)


class Teacher:
    """Implements `Generator`. `vocab_size` is the tokenizer's: the teacher must know every token of it."""

    def __init__(self, name: str, config: TeacherConfig, vocab_size: int) -> None:
        self.name = name
        self._config = config
        self._vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self._connected: EngineClient | None = None
        self._slots = asyncio.Semaphore(config.max_concurrency)

    def __str__(self) -> str:
        return f"teacher {self.name!r} at {self._config.url}"

    async def start(self) -> None:
        """Wait until it is healthy. Raises `PeerLostError` at the deadline, `UserError` if it is another model.
        Idempotent."""
        if self._session is not None:
            return
        self._session = new_session()
        self._connected = EngineClient(self._session, self._config.url.rstrip("/"), None)
        health = await self._wait_healthy()
        if self._config.model not in (None, health.model):
            raise UserError(f"{self} serves model {health.model!r}, not {self._config.model!r}")
        if health.vocab_size < self._vocab_size:
            raise UserError(
                f"{self} has a vocabulary of {health.vocab_size}, the policy's tokenizer one of {self._vocab_size}: "
                "it must be a model with the same tokenizer"
            )

    async def check_scoring(self) -> None:
        """Raise `UserError` if it cannot score at all, `PeerLostError` if it does not answer."""
        try:
            await self.score("probe", np.zeros(2, np.int32), 1.0)
        except TemporaryError as error:
            raise PeerLostError(f"{self} does not score: {error}") from error
        except EngineError as error:
            raise UserError(f"{self} cannot score: {error}") from error

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See `Generator`. The reply names no version: no policy of ours sampled it."""
        reply: GenerateReply = await self._retrying(self._client.sample, request, self._config.request_timeout_s)
        return msgspec.structs.replace(check_reply(request, reply, self._vocab_size), versions=())

    async def score(self, request_id: str, token_ids: Int32s, temperature: float) -> Floats:
        """float32[T]: log probabilities of the tokens at `temperature`, 0 at position 0. Raises `EngineError`."""
        request = ScoreRequest(request_id=request_id, token_ids=EncodedTensor.of(token_ids), temperature=temperature)
        async with self._slots:
            body, timeout_s = _encoder.encode(request), self._config.request_timeout_s
            payload: bytes = await self._retrying(self._client.score, body, timeout_s)
        return checked_scores(request, _decode(request_id, payload))

    async def close(self) -> None:
        """Release connections. Idempotent."""
        session, self._session, self._connected = self._session, None, None
        if session is not None:
            await session.close()

    @property
    def _client(self) -> EngineClient:
        if self._connected is None:
            raise EngineError(f"{self} is closed or was not started")
        return self._connected

    @property
    def _retrying(self) -> AsyncRetrying:
        return retrying(self._config.max_retries)

    async def _wait_healthy(self) -> EngineHealth:
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            try:
                return await self._client.health()
            except EngineError as error:
                if time.monotonic() + HEALTH_POLL_S > deadline:
                    timeout_s = self._config.start_timeout_s
                    raise PeerLostError(f"{self} is not healthy after {timeout_s:g} s: {error}") from error
            await asyncio.sleep(HEALTH_POLL_S)


def checked_scores(request: ScoreRequest, reply: ScoreReply) -> Floats:
    """The log probabilities in `reply`, if they can be trained on. Raises `InvalidResponse`."""
    what = f"scores of {request.request_id}"
    if reply.request_id != request.request_id:
        raise InvalidResponse(f"{what} answer another request, {reply.request_id!r}")
    try:
        reply.logprobs.check()
    except CodecError as error:
        raise InvalidResponse(f"{what}: {error}") from error
    num_tokens = request.token_ids.shape[0]
    if not reply.logprobs.is_vector("float32", num_tokens):
        got = f"{reply.logprobs.dtype}{list(reply.logprobs.shape)}"
        raise InvalidResponse(f"{what} must be float32[{num_tokens}], got {got}")
    logprobs: Floats = reply.logprobs.numpy()
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_SLACK:
        raise InvalidResponse(f"{what} are not finite numbers <= 0")
    return logprobs


def _decode(request_id: str, payload: bytes) -> ScoreReply:
    try:
        return _score_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidResponse(f"the teacher's reply to {request_id} does not decode: {error}") from error
