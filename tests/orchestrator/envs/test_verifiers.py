import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import EngineError
from orchestrator.engines.scripted import Latency, ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest, accept
from orchestrator.envs.verifiers.drivers import DirectDriver, GatewayDriver
from orchestrator.envs.verifiers.loading import VerifiersAdapter
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.errors import UserError
from tests.chat.replies import check_branch, sampled_tokens
from tests.support.waiting import until_async
from transport.wire.generation import GenerateReply, GenerateRequest

pytestmark = pytest.mark.usefixtures("env_modules")
DRIVERS = pytest.mark.parametrize("driver", ["direct", "gateway"])


class DeadEngine(ScriptedEngine):
    """Never answers usefully."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        raise EngineError("engine http://nowhere is gone")


def random_engine(tokenizer: Tokenizer, latency: Latency | None = None) -> ScriptedEngine:
    return ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=latency)


def saying(tokenizer: Tokenizer, text: str) -> ScriptedEngine:
    ids = np.append(tokenizer.encode(text), min(tokenizer.eos_ids)).astype(np.int32)
    return ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), script=lambda request: ids)


@asynccontextmanager
async def running(config: EnvConfig, engine: ScriptedEngine, tokenizer: Tokenizer) -> AsyncIterator[VerifiersAdapter]:
    """The adapter while it is started; afterwards nothing of it may be left."""
    before = asyncio.all_tasks()
    adapter = load_env(config, engine, tokenizer)
    assert isinstance(adapter, VerifiersAdapter)
    await adapter.start()
    try:
        yield adapter
    finally:
        await adapter.close()
        await adapter.close()
    left = asyncio.all_tasks() - before
    await until_async(lambda: all(task.done() for task in left))
    assert engine.num_running == 0


def request_for(adapter: EnvAdapter, example: int = 0, **changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {
        "example": adapter.examples[example],
        "group_id": f"{adapter.name}/{adapter.examples[example].example_id}/0",
        "index": 0,
        "group_size": 4,
        "seed": 11,
        "temperature": 0.9,
        "max_tokens": 16,
        "timeout_s": 20.0,
    }
    return RolloutRequest(**(fields | changes))


def only(results: Sequence[Rollout | RolloutFailure]) -> Rollout:
    (result,) = results
    assert isinstance(result, Rollout), result
    return result


def the_failure(results: Sequence[Rollout | RolloutFailure]) -> RolloutFailure:
    (result,) = results
    assert isinstance(result, RolloutFailure), result
    return result


@DRIVERS
async def test_single_turn_task_is_scored_by_its_own_rewards(tokenizer: Tokenizer, driver: str) -> None:
    config = EnvConfig(id="edge-single", driver=driver)
    async with running(config, saying(tokenizer, "1"), tokenizer) as adapter:
        assert isinstance(adapter.driver, DirectDriver if driver == "direct" else GatewayDriver)
        right = only(await adapter.run(request_for(adapter, example=1)))
        wrong = only(await adapter.run(request_for(adapter, example=2)))
        cut = only(await adapter.run(request_for(adapter, example=1, max_tokens=1)))
    assert (right.reward, wrong.reward, cut.reward) == (1.0, 0.0, 1.5)
    assert (right.is_truncated, cut.is_truncated) == (False, True)
    assert right.metrics == {"reply_chars": 1.0}
    assert (right.env_name, right.example_id, right.temperature) == ("edge-single", "1", 0.9)
    assert [message["content"] for message in right.messages] == ["be brief", "say 1", "1"]


@DRIVERS
async def test_branch_holds_the_prompt_and_the_exact_sampled_tokens(tokenizer: Tokenizer, driver: str) -> None:
    engine = random_engine(tokenizer)
    async with running(EnvConfig(id="edge_single", driver=driver), engine, tokenizer) as adapter:
        rollout = only(await adapter.run(request_for(adapter)))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say 0"}]
    prompt = tokenizer.encode_chat(messages)
    (branch,) = rollout.branches
    check_branch(branch)
    assert branch.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert not branch.sampled[: len(prompt)].any()
    assert branch.sampled[len(prompt) :].all()
    assert rollout.num_sampled_tokens == len(branch.token_ids) - len(prompt)


async def test_both_drivers_give_the_same_rollout(tokenizer: Tokenizer) -> None:
    rollouts = []
    for driver in ("direct", "gateway"):
        async with running(EnvConfig(id="edge-single", driver=driver), random_engine(tokenizer), tokenizer) as adapter:
            rollouts.append(only(await adapter.run(request_for(adapter, seed=77, index=3))))
    direct, gateway = rollouts
    assert direct.branches[0].token_ids.tolist() == gateway.branches[0].token_ids.tolist()
    assert direct.branches[0].logprobs.tolist() == gateway.branches[0].logprobs.tolist()
    assert (direct.reward, direct.metrics, direct.messages) == (gateway.reward, gateway.metrics, gateway.messages)


@DRIVERS
@pytest.mark.parametrize(
    ("scoring", "reason", "message"),
    [
        ("nan", FailureReason.INVALID_REWARD, "nan"),
        ("raise", FailureReason.ENV_ERROR, "cannot score this"),
        ("hang", FailureReason.ENV_TIMEOUT, "longer than 0.6 s"),
    ],
)
async def test_environment_that_fails_is_data(
    tokenizer: Tokenizer, driver: str, scoring: str, reason: FailureReason, message: str
) -> None:
    config = EnvConfig(id="edge-single", driver=driver, args={"task": {"scoring": scoring}})
    async with running(config, saying(tokenizer, "0"), tokenizer) as adapter:
        results = await adapter.run(request_for(adapter, timeout_s=0.6 if scoring == "hang" else 20))
    failed = the_failure(accept(results, 1, version=0))
    assert failed.reason is reason
    assert message in failed.message


async def test_reward_that_never_came_is_not_a_zero(tokenizer: Tokenizer) -> None:
    """verifiers stops scoring at the task's own deadline, and counts what is missing as 0."""
    config = EnvConfig(id="edge-single", args={"task": {"scoring": "hang"}, "scoring_timeout_s": 0.2})
    async with running(config, saying(tokenizer, "0"), tokenizer) as adapter:
        assert isinstance(adapter.driver, GatewayDriver)
        failed = the_failure(await adapter.run(request_for(adapter)))
    assert failed.reason is FailureReason.ENV_TIMEOUT
    assert "rewards were not computed: exact" in failed.message


@DRIVERS
async def test_engine_that_fails_is_blamed(tokenizer: Tokenizer, driver: str) -> None:
    engine = DeadEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))
    async with running(EnvConfig(id="edge-single", driver=driver), engine, tokenizer) as adapter:
        failed = the_failure(await adapter.run(request_for(adapter)))
    assert failed == RolloutFailure(FailureReason.ENGINE_ERROR, "engine http://nowhere is gone")


@DRIVERS
async def test_invalid_response_is_its_own_reason(tokenizer: Tokenizer, driver: str) -> None:
    engine = ScriptedEngine(4, 2, script=lambda request: np.array([99], dtype=np.int32))
    async with running(EnvConfig(id="edge-single", driver=driver), engine, tokenizer) as adapter:
        failed = the_failure(await adapter.run(request_for(adapter)))
    assert failed.reason is FailureReason.INVALID_RESPONSE


@DRIVERS
async def test_slow_engine_ends_at_the_rollouts_deadline(tokenizer: Tokenizer, driver: str) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=lambda request, count: 60.0)
    async with running(EnvConfig(id="edge-single", driver=driver), engine, tokenizer) as adapter:
        async with asyncio.timeout(10):
            failed = the_failure(await adapter.run(request_for(adapter, timeout_s=0.6)))
    assert failed.reason is FailureReason.ENV_TIMEOUT


@DRIVERS
async def test_cancellation_propagates_and_leaves_nothing_behind(tokenizer: Tokenizer, driver: str) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=lambda request, count: 60.0)
    async with running(EnvConfig(id="edge-single", driver=driver), engine, tokenizer) as adapter:
        task = asyncio.create_task(adapter.run(request_for(adapter)))
        await until_async(lambda: engine.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, timeout=10)


async def test_two_turns_are_one_branch_of_exact_tokens(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-two-turns"), random_engine(tokenizer), tokenizer) as adapter:
        assert isinstance(adapter.driver, GatewayDriver)
        assert not adapter.scores_jointly
        rollout = only(await adapter.run(request_for(adapter)))
    (branch,) = rollout.branches
    check_branch(branch)
    assert rollout.reward == 2.0
    assert len(branch.versions) == 2
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "user", "assistant"]
    # The whole conversation as the template writes it: equal text, though the ids were never taken from it.
    text = tokenizer.decode(branch.token_ids, skip_special_tokens=False)
    assert text + "\n" == tokenizer.render(rollout.messages, add_generation_prompt=False)


async def test_many_rollouts_at_once_keep_their_tokens_apart(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-two-turns"), random_engine(tokenizer), tokenizer) as adapter:
        requests = [request_for(adapter, seed=1000 * index, index=index) for index in range(12)]
        together = [only(result) for result in await asyncio.gather(*map(adapter.run, requests))]
        alone = only(await adapter.run(requests[5]))
    assert sampled_tokens(together[5].branches) == sampled_tokens(alone.branches)
    assert len({tuple(sampled_tokens(rollout.branches)) for rollout in together}) == 12


async def test_env_that_raises_between_turns_is_an_env_error(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-two-turns"), random_engine(tokenizer), tokenizer) as adapter:
        failed = the_failure(await adapter.run(request_for(adapter, example=1)))
    assert failed.reason is FailureReason.ENV_ERROR
    assert "the environment tripped" in failed.message


async def test_agent_that_is_not_trained_is_left_out(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    async with running(EnvConfig(id="edge-two-turns"), engine, tokenizer) as adapter:
        rollout = only(await adapter.run(request_for(adapter, example=2)))
    assert engine.num_requests == 3
    assert sum(len(branch.versions) for branch in rollout.branches) == 2


async def test_joint_group_comes_back_whole_with_cross_scores(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-race", group_size=4), random_engine(tokenizer), tokenizer) as adapter:
        assert adapter.scores_jointly
        results = await adapter.run(request_for(adapter, max_tokens=30))
    rollouts = [only([result]) for result in results]
    lengths = [len(str(rollout.messages[-1]["content"])) for rollout in rollouts]
    assert len(rollouts) == 4
    assert [rollout.reward for rollout in rollouts] == [float(length == max(lengths)) for length in lengths]
    assert len({tuple(sampled_tokens(rollout.branches)) for rollout in rollouts}) == 4


async def test_joint_group_is_the_same_when_run_again_whoever_finishes_first(tokenizer: Tokenizer) -> None:
    draws = []
    for slowest in (0, 2):
        engine = random_engine(
            tokenizer, lambda request, count, slow=slowest: 0.2 * (f"#{slow}/" in request.request_id)
        )
        async with running(EnvConfig(id="edge-race", group_size=3), engine, tokenizer) as adapter:
            results = await adapter.run(request_for(adapter, group_size=3))
        draws.append([sampled_tokens(only([result]).branches) for result in results])
    assert draws[0] == draws[1]


async def test_joint_group_with_a_missing_member_fails_whole(tokenizer: Tokenizer) -> None:
    config = EnvConfig(id="edge-race", group_size=4, args={"num_missing": 1})
    async with running(config, random_engine(tokenizer), tokenizer) as adapter:
        results = await adapter.run(request_for(adapter))
    assert len(results) == 4
    assert {result.reason for result in results if isinstance(result, RolloutFailure)} == {FailureReason.ENV_ERROR}
    assert "3 trainable traces, expected 4" in the_failure(results[:1]).message


async def test_joint_group_with_a_dead_engine_fails_whole(tokenizer: Tokenizer) -> None:
    engine = DeadEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))
    async with running(EnvConfig(id="edge-race", group_size=4), engine, tokenizer) as adapter:
        results = await adapter.run(request_for(adapter))
    assert [the_failure([result]).reason for result in results] == [FailureReason.ENGINE_ERROR] * 4


@pytest.mark.parametrize("env_id", ["edge-single", "edge_single", "owner/edge-single", "owner/edge-single@1.2"])
def test_id_may_have_dashes_and_an_owner(tokenizer: Tokenizer, env_id: str) -> None:
    adapter = load_env(EnvConfig(id=env_id, args={"num_tasks": 5}), random_engine(tokenizer), tokenizer)
    assert [example.example_id for example in adapter.examples] == ["0", "1", "2", "3", "4"]


def test_own_ids_of_the_examples_are_kept(tokenizer: Tokenizer) -> None:
    config = EnvConfig(id="edge-single", name="words", args={"named": True})
    adapter = load_env(config, random_engine(tokenizer), tokenizer)
    assert [example.example_id for example in adapter.examples] == ["word-0", "word-1", "word-2"]
    assert adapter.examples[0].env_name == adapter.name == "words"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"id": "no-such-env"},
            r"'no-such-env' does not exist: tried to import verifiers.v1.tasksets.no_such_env and no_such_env",
        ),
        ({"id": "a.b"}, "does not exist"),
        ({"id": "edge-single", "args": {"num_task": 3}}, "num_task"),
        ({"id": "edge-single", "args": {"num_tasks": "many"}}, "num_tasks"),
        ({"id": "edge-single", "args": {"num_tasks": 0}}, "no tasks"),
        ({"id": "json"}, "cannot be loaded"),
        ({"id": "edge-two-turns", "driver": "direct"}, "its own Env"),
        ({"id": "edge-race", "driver": "direct"}, "its episodes are groups"),
        ({"id": "edge-broken"}, "this module is broken"),
        ({"id": "edge-incomplete"}, "No module named .a_package_that_is_not_installed"),
    ],
)
def test_mistake_in_the_config_is_one_clear_line(tokenizer: Tokenizer, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load_env(EnvConfig(**config), random_engine(tokenizer), tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        ("edge-hooks", "setup or finalize hooks"),
        ("edge-stops", "stop or intercept"),
        ("edge-runtime", "needs a runtime"),
        ("edge-silent", "no prompt"),
    ],
)
def test_task_that_needs_more_than_a_completion_is_not_direct(tokenizer: Tokenizer, env_id: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_env(EnvConfig(id=env_id, driver="direct"), random_engine(tokenizer), tokenizer)
    adapter = load_env(EnvConfig(id=env_id), random_engine(tokenizer), tokenizer)
    assert isinstance(adapter, VerifiersAdapter)
    assert isinstance(adapter.driver, GatewayDriver)


async def test_hooks_run_under_the_gateway_driver(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-hooks"), random_engine(tokenizer), tokenizer) as adapter:
        rollout = only(await adapter.run(request_for(adapter)))
    assert rollout.reward == 3.0


async def test_runtime_of_a_task_is_a_local_folder(tokenizer: Tokenizer) -> None:
    async with running(EnvConfig(id="edge-runtime"), random_engine(tokenizer), tokenizer) as adapter:
        assert only(await adapter.run(request_for(adapter))).reward == 1.0
