"""Fakes around the real orchestrator: an environment that is one request, and a trainer that only waits.

`FakeEnv` implements `EnvAdapter` in this process. `python -m benchmarks.fakes ENDPOINT RUN STEP_S` is a trainer:
the real client in its own process, which fetches every batch, sleeps `STEP_S` and announces the next version. It prints
one JSON line at the end: how long it waited for batches after the first, how long it ran, and what it trained.
"""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np

from chat.trajectory import Branch
from orchestrator.engines.protocol import Engine
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.values.rollout import Example, Rollout, RolloutFailure
from transport.client.client import BatchClient
from transport.wire.generation import GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

PROMPT_TOKENS = 32
NUM_EXAMPLES = 100_000


class FakeEnv:
    """One completion per rollout; the reward is a coin toss, so that groups differ."""

    scores_jointly = False

    def __init__(self, engine: Engine, name: str = "fake") -> None:
        self.name = name
        self._engine = engine
        self._prompt = np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32)
        self._encoded_prompt = EncodedTensor.of(self._prompt)
        self._examples = [Example(name, str(index), index) for index in range(NUM_EXAMPLES)]

    @property
    def examples(self) -> Sequence[Example]:
        """All examples."""
        return self._examples

    async def start(self) -> None:
        """Nothing to bring up."""

    async def close(self) -> None:
        """Nothing to release."""

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        """One request to the engine."""
        started = time.monotonic()
        reply = await self._engine.generate(
            GenerateRequest(
                request_id=f"{request.group_id}#{request.index}",
                token_ids=self._encoded_prompt,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
            )
        )
        completion = reply.token_ids.numpy()
        num_tokens = PROMPT_TOKENS + len(completion)
        sampled = np.ones(num_tokens, np.bool_)
        sampled[:PROMPT_TOKENS] = False
        logprobs = np.zeros(num_tokens, np.float32)
        logprobs[PROMPT_TOKENS:] = reply.logprobs.numpy()
        spans = tuple(VersionSpan(s.version, s.start + PROMPT_TOKENS, s.end + PROMPT_TOKENS) for s in reply.versions)
        rollout = Rollout(
            env_name=self.name,
            example_id=request.example.example_id,
            reward=float(request.seed & 1),
            branches=(Branch(np.concatenate((self._prompt, completion)), sampled, logprobs, spans),),
            temperature=request.temperature,
            is_truncated=reply.finish_reason == "length",
            metrics={},
            messages=(),
            duration_s=time.monotonic() - started,
        )
        return [rollout]


def train(endpoint: str, run_id: str, step_s: float) -> dict[str, float]:
    """Take every batch to the end of the run; seconds waited and spent from the end of the first step on."""
    waited_s = began = 0.0
    num_samples = num_tokens = 0
    with BatchClient(endpoint, run_id, lost_timeout_s=300.0) as client:
        step = client.hello()
        asked = time.monotonic()
        while (manifest := client.manifest(step)) is not None:
            client.samples(manifest, range(manifest.num_samples))
            num_samples += manifest.num_samples
            num_tokens += int(manifest.columns.loss_tokens.numpy().sum())
            waited_s += time.monotonic() - asked if began else 0.0
            time.sleep(step_s)
            client.weights_published(step, f"weights/v{step}", f"digest-{step}")
            client.trained(step)
            client.committed(step)
            step, asked = step + 1, time.monotonic()
            began = began or asked
    return {
        "steps": step - 1,
        "waited_s": waited_s,
        "elapsed_s": asked - began,
        "samples": num_samples,
        "trained_tokens": num_tokens,
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
