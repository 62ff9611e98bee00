"""Teachers over real HTTP: found at start-up, bounded, retried, and their failures are data."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from aiohttp import web
from msgspec.structs import replace

from orchestrator.config.algorithm import TeacherConfig
from orchestrator.engines.protocol import EngineError, InvalidResponse, checked_scores
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.teachers.scored_env import ScoredEnv
from orchestrator.teachers.teacher import Teacher
from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure
from runtime.errors import PeerLostError, UserError
from tests.orchestrator.builders import ENV_ERROR, make_rollout
from tests.orchestrator.engine_server import VOCAB_SIZE, EngineServer, serving
from tests.orchestrator.engines.test_http_engine import ask, hang, reset, status
from transport.wire.generation import ScoreReply, ScoreRequest
from transport.wire.sample import EncodedTensor

TOKENS = np.array([3, 4, 5], dtype=np.int32)


def scores(request: ScoreRequest) -> ScoreReply:
    """Minus the token id over ten, times the temperature: easy to recognise."""
    values = -request.token_ids.numpy().astype(np.float32) / 10 * request.temperature
    values[0] = 0
    return ScoreReply(request_id=request.request_id, logprobs=EncodedTensor.of(values), version=0)


@asynccontextmanager
async def taught(server: EngineServer, vocab_size: int = VOCAB_SIZE, **options: object) -> AsyncIterator[Teacher]:
    settings = {"start_timeout_s": 0.5, "request_timeout_s": 2.0} | options
    teacher = Teacher("big", TeacherConfig(url=server.url, **settings), vocab_size)
    try:
        await teacher.start()
        yield teacher
    finally:
        await teacher.close()


async def test_scores_come_back_for_every_token_at_the_temperature_asked() -> None:
    async with serving(EngineServer(scores=scores)) as server, taught(server) as teacher:
        await teacher.check_scoring()
        logprobs = await teacher.score("r", TOKENS, 2.0)
    np.testing.assert_allclose(logprobs, [0, -0.8, -1.0], rtol=1e-6)
    assert server.scored[-1].token_ids.numpy().tolist() == [3, 4, 5]


async def test_a_teacher_that_is_not_there_is_named_with_its_url_at_start_up() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=f"teacher 'big' at {url} is not ready after 0.5 s"):
        async with taught(EngineServer(url=url)):
            pass


async def test_a_teacher_that_loads_is_waited_for() -> None:
    async with serving(EngineServer(num_loading=2)) as server, taught(server, start_timeout_s=5.0):
        assert server.num_loading == 0


@pytest.mark.parametrize(
    ("options", "vocab_size", "said"),
    [({"model": "other"}, VOCAB_SIZE, "'tiny', not 'other'"), ({}, VOCAB_SIZE + 1, "same tokenizer")],
)
async def test_another_model_is_refused_at_start_up(options: dict[str, str], vocab_size: int, said: str) -> None:
    async with serving(EngineServer()) as server:
        with pytest.raises(UserError, match=said):
            async with taught(server, vocab_size, **options):
                pass


async def test_a_server_without_scoring_is_refused_at_start_up() -> None:
    async with serving(EngineServer()) as server, taught(server) as teacher:
        with pytest.raises(UserError, match=r"cannot score.*404"):
            await teacher.check_scoring()
    mute = EngineServer(scores=scores, misbehaviours=[status(501)])
    async with serving(mute) as server, taught(server) as teacher:
        with pytest.raises(UserError, match=r"cannot score.*501"):
            await teacher.check_scoring()


async def test_a_server_that_does_not_answer_the_probe_is_a_lost_peer() -> None:
    server = EngineServer(scores=scores, misbehaviours=[status(503)])
    async with serving(server), taught(server, max_retries=0) as teacher:
        with pytest.raises(PeerLostError, match=r"does not score.*503"):
            await teacher.check_scoring()


async def test_scoring_is_tried_again_when_that_may_help() -> None:
    server = EngineServer(scores=scores, misbehaviours=[status(503), reset])
    async with serving(server), taught(server) as teacher:
        assert len(await teacher.score("r", TOKENS, 1.0)) == 3


async def test_no_more_requests_run_than_allowed() -> None:
    async with serving(EngineServer(scores=scores)) as server, taught(server, max_concurrency=3) as teacher:
        await asyncio.gather(*(teacher.score(f"r-{index}", TOKENS, 1.0) for index in range(40)))
    assert server.most_scoring <= 3
    assert len(server.scored) == 40


def reply(values: Sequence[float], request_id: str = "r") -> ScoreReply:
    logprobs = EncodedTensor.of(np.array(values, dtype=np.float32))
    return ScoreReply(request_id=request_id, logprobs=logprobs, version=0)


@pytest.mark.parametrize(
    "bad",
    [
        reply([0.0, -1.0]),
        reply([0.0, -1.0, float("nan")]),
        reply([0.0, -1.0, -float("inf")]),
        reply([0.0, -1.0, 0.5]),
        reply([0.0, -1.0, -1.0], request_id="other"),
        ScoreReply(request_id="r", logprobs=EncodedTensor.of(TOKENS), version=0),
        ScoreReply(request_id="r", logprobs=EncodedTensor("float32", (3,), memoryview(b"123")), version=0),
    ],
)
def test_scores_that_cannot_be_trained_on_are_refused(bad: ScoreReply) -> None:
    with pytest.raises(InvalidResponse, match="scores of r"):
        checked_scores(ScoreRequest(request_id="r", token_ids=EncodedTensor.of(TOKENS)), bad)


async def test_a_reply_that_does_not_decode_is_refused() -> None:
    async def garbage(request: web.Request) -> web.Response:
        return web.Response(body=b"nonsense")

    server = EngineServer(scores=scores, misbehaviours=[garbage])
    async with serving(server), taught(server) as teacher:
        with pytest.raises(InvalidResponse, match="does not decode"):
            await teacher.score("r", TOKENS, 1.0)


async def test_what_a_teacher_generates_names_no_version_of_ours() -> None:
    async with serving(EngineServer()) as server, taught(server) as teacher:
        generated = await teacher.generate(ask(3))
        assert generated.versions == ()
        same = await server.engine.generate(ask(3))
    assert replace(same, versions=()) == generated


async def test_a_closed_teacher_says_so() -> None:
    async with serving(EngineServer(scores=scores)) as server, taught(server) as teacher:
        await teacher.close()
        with pytest.raises(EngineError, match="closed"):
            await teacher.score("r", TOKENS, 1.0)


class FixedEnv:
    """Returns the results it was made with."""

    name = "fixed"
    scores_jointly = False

    def __init__(self, *results: Rollout | RolloutFailure) -> None:
        self.results = results
        self.is_open = False
        self.examples = [Example("fixed", "0", None)]

    async def start(self) -> None:
        self.is_open = True

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        return self.results

    async def close(self) -> None:
        self.is_open = False


def rollout_request(timeout_s: float = 5.0) -> RolloutRequest:
    return RolloutRequest(
        example=Example("fixed", "0", None),
        group_id="fixed/0/0",
        index=2,
        group_size=4,
        seed=0,
        temperature=1.0,
        max_tokens=4,
        timeout_s=timeout_s,
    )


async def test_finished_rollouts_get_the_teachers_view_of_every_trained_branch() -> None:
    rollout = make_rollout()
    context_only = replace(rollout.branches[0], sampled=np.zeros(5, np.bool_))
    env = FixedEnv(replace(rollout, temperature=0.5, branches=(*rollout.branches, context_only)), ENV_ERROR)
    async with serving(EngineServer(scores=scores)) as server, taught(server) as teacher:
        adapter = ScoredEnv(env, teacher)
        await adapter.start()
        scored, failed = await adapter.run(rollout_request())
        assert env.is_open
        await adapter.close()
    assert not env.is_open
    assert isinstance(scored, Rollout)
    assert scored.branches[0].ref_logprobs is not None
    np.testing.assert_allclose(scored.branches[0].ref_logprobs, [0, -0.05, -0.1, -0.15, -0.2], rtol=1e-6)
    assert scored.branches[1].ref_logprobs is None
    assert failed is ENV_ERROR
    assert [ask.request_id for ask in server.scored] == ["probe", "fixed/0/0#2/0"]


async def test_a_teacher_that_fails_costs_the_rollout_with_its_reason() -> None:
    server = EngineServer(scores=scores)
    async with serving(server), taught(server, max_retries=0) as teacher:
        server.misbehaviours.append(status(400))
        (result,) = await ScoredEnv(FixedEnv(make_rollout()), teacher).run(rollout_request())
    assert isinstance(result, RolloutFailure)
    assert result.reason is FailureReason.TEACHER_ERROR
    assert server.url in result.message


async def test_a_teacher_that_hangs_costs_the_rollout_at_its_deadline_and_leaves_no_task() -> None:
    server = EngineServer(scores=scores, misbehaviours=[hang])
    async with serving(server), taught(server, request_timeout_s=60.0) as teacher:
        results = await ScoredEnv(FixedEnv(make_rollout(), ENV_ERROR), teacher).run(rollout_request(timeout_s=0.1))
        assert not [task for task in asyncio.all_tasks() if "ScoredEnv" in repr(task)], "an orphan task is left"
    reasons = [result.reason for result in results if isinstance(result, RolloutFailure)]
    assert reasons == [FailureReason.TEACHER_ERROR, ENV_ERROR.reason]


async def test_an_environment_that_uses_up_the_time_is_not_the_teachers_fault() -> None:
    class SlowEnv(FixedEnv):
        async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.timeout_s + 0.01):
                    await asyncio.Event().wait()
            return self.results

    overdue = RolloutFailure(FailureReason.ENV_TIMEOUT, "took longer")
    async with serving(EngineServer(scores=scores)) as server, taught(server) as teacher:
        results = await ScoredEnv(SlowEnv(overdue), teacher).run(rollout_request(timeout_s=0.01))
    assert list(results) == [overdue]
