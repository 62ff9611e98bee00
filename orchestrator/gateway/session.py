"""`Session`: the turns of one rollout, from messages to exact tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.chat_template import Message
from orchestrator.engines.protocol import EngineError, Generator
from orchestrator.tokenizer import Tokenizer
from orchestrator.trajectory import Trajectory
from transport.generation import GenerateRequest
from transport.tensor import EncodedTensor


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How the turns of one rollout are sampled: turn `k` uses `seed + k`."""

    trajectory_id: str
    seed: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn, as a chat client wants it."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_sampled_tokens: int


class Session:
    """Samples turns and keeps what they were. `failure` is the engine's error, once there was one."""

    def __init__(self, engine: Generator, tokenizer: Tokenizer, plan: SamplingPlan) -> None:
        self.plan = plan
        self.trajectory = Trajectory(tokenizer)
        self.failure: EngineError | None = None
        self.is_truncated = False
        """Whether a completion was cut at its token limit."""
        self._engine = engine
        self._num_started = 0

    async def complete(self, messages: Sequence[Message], max_tokens: int | None = None) -> Completion:
        """The assistant's next turn, `max_tokens` at most. Raises `EngineError`, `ChatTemplateError`."""
        prompt = self.trajectory.prompt(messages)
        turn = self._num_started
        self._num_started += 1
        request = GenerateRequest(
            request_id=f"{self.plan.trajectory_id}/{turn}",
            token_ids=EncodedTensor.of(prompt.token_ids),
            max_tokens=min(self.plan.max_tokens, max_tokens or self.plan.max_tokens),
            temperature=self.plan.temperature,
            seed=self.plan.seed + turn,
        )
        try:
            reply = await self._engine.generate(request)
        except EngineError as error:
            self.failure = error
            raise
        text = self.trajectory.record(prompt, reply)
        self.is_truncated |= reply.finish_reason == "length"
        finish_reason: Literal["stop", "length"] = "length" if reply.finish_reason == "length" else "stop"
        return Completion(text, finish_reason, len(prompt.token_ids), reply.token_ids.shape[0])
