"""All rollouts of an evaluation, some at a time. The same examples and seeds whatever the model: figures compare."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from orchestrator.config.eval import EvalEnvConfig
from orchestrator.data.seeds import rollout_seed
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest, accept, call_adapter
from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure
from transport.changes import Changes

Envs = Sequence[tuple[EvalEnvConfig, EnvAdapter]]
Outcomes = dict[str, dict[str, list[Rollout | RolloutFailure]]]
"""By environment and example id; every slot is a failure until its rollout comes back."""
UNFINISHED = RolloutFailure(FailureReason.CANCELLED, "the evaluation ended before the rollout did")


def unplayed(envs: Envs) -> Outcomes:
    """All slots, before anything is played."""
    return {
        env.label: {
            example.example_id: [UNFINISHED] * env.rollouts_per_example
            for example in adapter.examples[: env.num_examples]
        }
        for env, adapter in envs
    }


async def play(
    envs: Envs,
    outcomes: Outcomes,
    version: int,
    *,
    seed: int,
    max_in_flight: int,
    on_result: Callable[[], None] = lambda: None,
) -> None:
    """Fill the slots of `outcomes`. What an older version than `version` sampled is a failure. A group that is scored
    jointly runs as a whole, alone if it is larger than `max_in_flight`."""
    num_running = 0
    ended = Changes()

    async def run(
        adapter: EnvAdapter, request: RolloutRequest, slots: list[Rollout | RolloutFailure], size: int
    ) -> None:
        nonlocal num_running
        results = accept(await call_adapter(adapter, request), size, version)
        slots[request.index : request.index + size] = results
        num_running -= size
        ended.notify()
        on_result()

    async with asyncio.TaskGroup() as tasks:
        for adapter, request, slots in _todo(envs, outcomes, version, seed):
            size = request.group_size if adapter.scores_jointly else 1
            while num_running and num_running + size > max_in_flight:
                await ended.wait()
            num_running += size
            tasks.create_task(run(adapter, request, slots, size))


def _todo(
    envs: Envs, outcomes: Outcomes, version: int, seed: int
) -> Iterator[tuple[EnvAdapter, RolloutRequest, list[Rollout | RolloutFailure]]]:
    for env, adapter in envs:
        for example in adapter.examples[: env.num_examples]:
            slots = outcomes[env.label][example.example_id]
            for index in range(1 if adapter.scores_jointly else len(slots)):
                # The same seeds for every version: two versions are compared on equal terms.
                own_seed = rollout_seed(seed, f"eval/{env.label}", example.example_id, 0, index)
                group_id = f"{env.label}/{example.example_id}/eval-{version}"
                yield adapter, _request(env, example, group_id, index, own_seed), slots


def _request(env: EvalEnvConfig, example: Example, group_id: str, index: int, seed: int) -> RolloutRequest:
    return RolloutRequest(
        example=example,
        group_id=group_id,
        index=index,
        group_size=env.rollouts_per_example,
        seed=seed,
        temperature=env.sampling.temperature,
        max_tokens=env.sampling.max_tokens,
        timeout_s=env.rollout_timeout_s,
    )
