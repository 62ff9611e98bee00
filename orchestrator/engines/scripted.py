"""`ScriptedEngine`: an engine without a model, for tests, benchmarks and simulation.

What it samples is a pure function of the request's seed and prompt, not of time or of the policy version, so two runs
with the same requests are equal. Latency, versions and failures are scripted by the caller, or by the config
(`engines.scripted`).
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from chat.tokenizer import Int32s, Tokenizer
from orchestrator.config.engines import ScriptedEngineConfig
from orchestrator.engines.protocol import Availability, EngineError, EngineLoad, check_reply
from transport.wire.generation import FinishReason, GenerateReply, GenerateRequest, ServedWeights
from transport.wire.sample import EncodedTensor, VersionSpan

Script = Callable[[GenerateRequest], Int32s]
"""Request to sampled ids; longer answers than `max_tokens` are cut."""
Latency = Callable[[GenerateRequest, int], float]
"""Request and number of sampled tokens to seconds."""


class ScriptedEngine:
    """Implements `Engine`. `script` replaces the random completion; a reply off the contract is `InvalidResponse`."""

    def __init__(
        self,
        vocab_size: int,
        eos_id: int,
        *,
        script: Script | None = None,
        latency: Latency | None = None,
        weights: ServedWeights | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_id = eos_id
        self.weights = weights or ServedWeights(version=0, digest="scripted-0")
        """What the engine serves; assign to script a version change, also while requests are in flight."""
        self.availability = Availability()
        """Assign to script an outage; requests wait for its end."""
        self.num_requests = 0
        self.num_running = 0
        self._script = script or self._random_completion
        self._latency = latency

    async def start(self) -> None:
        """Always healthy."""

    async def keep_in_service(self) -> None:
        """Nothing leaves by itself."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The scripted completion. A request that outlives a version change has tokens of both versions."""
        await self.availability.wait()
        self.num_requests += 1
        self.num_running += 1
        try:
            token_ids, finish_reason = self._cut(request, self._script(request))
            first = self.weights.version
            if self._latency is not None:
                await asyncio.sleep(self._latency(request, len(token_ids)))
            versions = _spans(first, self.weights.version, len(token_ids))
        finally:
            self.num_running -= 1
        reply = GenerateReply(
            request_id=request.request_id,
            token_ids=EncodedTensor.of(token_ids),
            logprobs=EncodedTensor.of(_logprobs(request, len(token_ids))),
            finish_reason=finish_reason,
            versions=versions,
        )
        return check_reply(request, reply, self.vocab_size)

    async def apply_weights(self, location: str, version: int, digest: str) -> None:
        """Serve `version` from now on; going back to an older one is refused."""
        if version < self.weights.version:
            raise EngineError(f"scripted engine serves version {self.weights.version}, refused {version}")
        self.weights = ServedWeights(version=version, digest=digest)

    async def generate_on_each(self, request: GenerateRequest) -> dict[str, GenerateReply]:
        """Nothing: without a model, answers say nothing about weights."""
        return {}

    async def load(self) -> EngineLoad:
        """It has a place for everyone."""
        return EngineLoad(num_running=self.num_running)

    async def served(self) -> ServedWeights:
        return self.weights

    async def close(self) -> None:
        """Nothing to release."""

    def _cut(self, request: GenerateRequest, token_ids: Int32s) -> tuple[Int32s, FinishReason]:
        stops = np.isin(token_ids, (self.eos_id, *request.stop_token_ids))
        end = int(np.argmax(stops)) + 1 if stops.any() else len(token_ids)
        cut = token_ids[: min(end, request.max_tokens)].astype(np.int32, copy=False)
        return cut, "stop" if stops[: len(cut)].any() else "length"

    def _random_completion(self, request: GenerateRequest) -> Int32s:
        rng = _rng(request)
        length = int(rng.integers(1, request.max_tokens + 1))
        others = rng.integers(0, self.vocab_size - 1, size=length)
        others[others >= self.eos_id] += 1  # every id but the end of sequence
        return np.append(others[:-1], self.eos_id).astype(np.int32)


def from_config(config: ScriptedEngineConfig, tokenizer: Tokenizer) -> ScriptedEngine:
    """The engine that `engines.scripted` describes, for the vocabulary of `tokenizer`."""
    eos_id = min(tokenizer.eos_ids)
    replies = [np.append(tokenizer.encode(text), eos_id).astype(np.int32) for text in config.replies]
    return ScriptedEngine(
        tokenizer.vocab_size,
        eos_id,
        script=one_of(replies, config.seed) if replies else None,
        latency=log_normal(config) if config.latency_s else None,
    )


def one_of(replies: Sequence[Int32s], seed: int) -> Script:
    """Each request gets one of `replies`."""
    return lambda request: replies[int(_rng(request, "reply", seed).integers(len(replies)))]


def log_normal(config: ScriptedEngineConfig) -> Latency:
    """Each request gets a latency around `config.latency_s`, which must not be 0."""

    def latency(request: GenerateRequest, _: int) -> float:
        spread = float(_rng(request, "latency", config.seed).normal())
        return config.latency_s * math.exp(config.latency_spread * spread)

    return latency


def _rng(request: GenerateRequest, purpose: str = "", seed: int = 0) -> np.random.Generator:
    """Random numbers of this request; other ones for another purpose."""
    state = xxhash.xxh3_64(request.token_ids.data, seed=(request.seed or 0) & (2**64 - 1))
    if purpose:
        state.update(f"{purpose} {seed}".encode())
    return np.random.default_rng(state.intdigest())


def _logprobs(request: GenerateRequest, num_tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return -_rng(request).exponential(size=num_tokens).astype(np.float32)


def _spans(first: int, last: int, num_tokens: int) -> tuple[VersionSpan, ...]:
    middle = num_tokens // 2
    if first == last or middle == 0:
        return (VersionSpan(last, 0, num_tokens),)
    return VersionSpan(first, 0, middle), VersionSpan(last, middle, num_tokens)
