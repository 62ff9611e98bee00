"""A worker's program with a toy environment: the real child, link and process, without the seconds of verifiers.

Run as a script (`python toy_worker.py FD`). What a rollout does follows from its group id.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import Generator
from orchestrator.envs.protocol import RolloutRequest, failure_of
from orchestrator.envs.session import SamplingPlan, Session
from orchestrator.envs.workers.child import main
from orchestrator.values.rollout import Example, Rollout, RolloutFailure
from runtime.errors import UserError
from tests.chat.drawn import data_url, draw, user
from tests.support.waiting import until

LONGEST_BLOCK_S = 120.0


class ToyAdapter:
    """One completion; `die`, `hang`, `block`, `misconfigured` in the group id do what they say."""

    scores_jointly = False

    def __init__(self, config: EnvConfig, generator: Generator, tokenizer: Tokenizer) -> None:
        if "refuse" in config.args:
            raise UserError(f"env {config.id!r} refuses its args")
        self.name = config.label
        self._generator = generator
        self._tokenizer = tokenizer

    @property
    def examples(self) -> Sequence[Example]:
        return [Example(self.name, name, name) for name in ("first", "second")]

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        misbehave(request.group_id)
        plan = SamplingPlan(
            f"{request.group_id}#{request.index}", request.seed, request.temperature, request.max_tokens
        )
        session = Session(self._generator, self._tokenizer, plan)
        try:
            await session.complete([message(request)])
        except Exception as error:
            return [failure_of(error)]
        branches = session.trajectory.branches()
        return [
            Rollout(
                env_name=self.name,
                example_id=request.example.example_id,
                reward=float(branches[0].sampled.sum() % 2),
                branches=branches,
                temperature=request.temperature,
                is_truncated=session.is_truncated,
                metrics={"pid": float(os.getpid())},
                messages=tuple(dict(message) for message in session.trajectory.messages),
                duration_s=0.0,
            )
        ]


def message(request: RolloutRequest) -> dict[str, object]:
    """With an image, where the group id asks for one."""
    text = f"go {request.example.example_id}"
    return user(data_url(draw(1)), text) if "image" in request.group_id else {"role": "user", "content": text}


def misbehave(group_id: str) -> None:
    if "die" in group_id:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in group_id:
        threading.Event().wait()
    if group_id.startswith("block"):
        until((Path(group_id.removeprefix("block")) / "free").exists, LONGEST_BLOCK_S)  # blocks the event loop
    if "misconfigured" in group_id:
        raise UserError("no column 'mood'")


if __name__ == "__main__":
    main(int(sys.argv[1]), ToyAdapter)
