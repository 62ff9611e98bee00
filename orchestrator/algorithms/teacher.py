"""`Teacher`: a frozen model behind one inference server of ours. It generates (`sft`) or scores (`opd`).

At most `max_concurrency` scoring requests run at the same time, each in the task of the rollout that needs it: the loop
that schedules never waits for a teacher.
"""

import asyncio
import time
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np

from orchestrator.algorithms.config import TeacherConfig
from orchestrator.engines.http_client import EngineClient, EngineHealth, new_session
from orchestrator.engines.protocol import EngineError, InvalidResponse
from orchestrator.engines.retry import TemporaryError, retrying
from orchestrator.engines.uploads import Uploads
from orchestrator.engines.validation import LOGPROB_SLACK, check_reply
from orchestrator.rollout import Floats, Int32s
from runtime.errors import PeerLostError, UserError
from transport.errors import CodecError
from transport.generation import GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.tensor import EncodedTensor

HEALTH_POLL_S = 0.2

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_score_decoder = msgspec.msgpack.Decoder(ScoreReply)
_generate_decoder = msgspec.msgpack.Decoder(GenerateReply)


class Teacher:
    """Implements `Generator`. `vocab_size` is the tokenizer's: the teacher must know every token of it."""

    def __init__(self, name: str, config: TeacherConfig, vocab_size: int) -> None:
        self.name = name
        self._config = config
        self._vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._uploads = Uploads()

    def __str__(self) -> str:
        return f"teacher {self.name!r} at {self._config.url}"

    async def start(self) -> None:
        """Wait until it is healthy. Raises `PeerLostError` at the deadline, `UserError` if it is another model.
        Idempotent."""
        if self._session is not None:
            return
        self._session = new_session()
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
        payload: bytes = await retrying(self._config.max_retries)(self._generate, request)
        reply = check_reply(request, _decode(_generate_decoder, request.request_id, payload), self._vocab_size)
        return msgspec.structs.replace(reply, versions=())

    async def score(self, request_id: str, token_ids: Int32s, temperature: float) -> Floats:
        """float32[T]: log probabilities of the tokens at `temperature`, 0 at position 0. Raises `EngineError`."""
        request = ScoreRequest(request_id=request_id, token_ids=EncodedTensor.of(token_ids), temperature=temperature)
        async with self._slots:
            payload: bytes = await retrying(self._config.max_retries)(self._score, _encoder.encode(request))
        return checked_scores(request, _decode(_score_decoder, request_id, payload))

    async def close(self) -> None:
        """Release connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _generate(self, request: GenerateRequest) -> bytes:
        return await self._client.generate(self._uploads.body(request), self._config.request_timeout_s)

    async def _score(self, body: bytes) -> bytes:
        return await self._client.score(body, self._config.request_timeout_s)

    @property
    def _client(self) -> EngineClient:
        if self._session is None:
            raise EngineError(f"{self} is closed or was not started")
        return EngineClient(self._session, self._config.url.rstrip("/"), None)

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


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", request_id: str, payload: bytes) -> _T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidResponse(f"the teacher's reply to {request_id} does not decode: {error}") from error
