"""`Teacher`: a frozen model behind one inference server of ours. It generates (`sft`) or scores (`opd`).

At most `max_concurrency` scoring requests run at the same time, each in the task of the rollout that needs it: the loop
that schedules never waits for a teacher.
"""

import asyncio

import aiohttp
import msgspec
import numpy as np

from chat.tokenizer import Int32s
from chat.trajectory import Floats
from orchestrator.config.algorithm import TeacherConfig
from orchestrator.engines.http_client import EngineClient, TemporaryError, new_session, retrying, when_ready
from orchestrator.engines.protocol import EngineError, check_reply, checked_scores
from runtime.errors import PeerLostError, UserError
from transport.wire.generation import GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.sample import EncodedTensor


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

    @property
    def urls(self) -> tuple[str, ...]:
        """Who has to answer, for `Health.waiting`."""
        return (self._config.url,)

    async def start(self) -> None:
        """Wait until it is healthy. Raises `PeerLostError` at the deadline, `UserError` if it is another model."""
        self._session = new_session()
        self._connected = EngineClient(self._session, self._config.url.rstrip("/"), None)
        try:
            health = await when_ready(self._connected.health, self._config.start_timeout_s, str(self))
        except EngineError as error:
            raise PeerLostError(str(error)) from error
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
        timeout_s, retry = self._config.request_timeout_s, retrying(self._config.max_retries)
        reply: GenerateReply = await retry(self._client.sample, request, timeout_s)
        return msgspec.structs.replace(check_reply(request, reply, self._vocab_size), versions=())

    async def score(self, request_id: str, token_ids: Int32s, temperature: float) -> Floats:
        """float32[T]: log probabilities of the tokens at `temperature`, 0 at position 0. Raises `EngineError`."""
        request = ScoreRequest(request_id=request_id, token_ids=EncodedTensor.of(token_ids), temperature=temperature)
        timeout_s, retry = self._config.request_timeout_s, retrying(self._config.max_retries)
        async with self._slots:
            reply: ScoreReply = await retry(self._client.score, request, timeout_s)
        return checked_scores(request, reply)

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
