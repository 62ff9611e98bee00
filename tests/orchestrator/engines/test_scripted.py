import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.tokenizer import Tokenizer
from orchestrator.config.engines import ScriptedEngineConfig
from orchestrator.engines.protocol import Engine, EngineError, InvalidResponse
from orchestrator.engines.scripted import ScriptedEngine, from_config, log_normal
from orchestrator.engines.validation import check_reply
from tests.chat.replies import make_reply
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor

EOS = 2


def ask(
    seed: int = 0, prompt: tuple[int, ...] = (5, 6), max_tokens: int = 8, stop: tuple[int, ...] = ()
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=EncodedTensor.of(np.array(prompt, dtype=np.int32)),
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=stop,
    )


def content(reply: GenerateReply) -> tuple[list[int], list[float]]:
    return reply.token_ids.numpy().tolist(), reply.logprobs.numpy().tolist()


async def test_completion_depends_on_seed_and_prompt_only() -> None:
    one, other = ScriptedEngine(100, EOS), ScriptedEngine(100, EOS)
    await one.generate(ask(seed=9))
    first = content(await one.generate(ask(seed=1)))
    assert content(await other.generate(ask(seed=1))) == first
    assert content(await other.generate(ask(seed=2))) != first
    assert content(await other.generate(ask(seed=1, prompt=(6, 5)))) != first


async def test_completions_are_of_all_lengths_and_end_once() -> None:
    engine: Engine = ScriptedEngine(20, EOS)
    replies = [await engine.generate(ask(seed=seed)) for seed in range(200)]
    ids = [reply.token_ids.numpy().tolist() for reply in replies]
    assert {len(each) for each in ids} == set(range(1, 9))
    assert all(each.count(EOS) == 1 and each[-1] == EOS for each in ids)
    assert {token for each in ids for token in each} == set(range(20))


@pytest.mark.parametrize(
    ("script", "stop", "expected", "finish_reason"),
    [
        ([7, EOS, 8], (), [7, EOS], "stop"),
        ([7, 8, 9, 10], (), [7, 8, 9], "length"),
        ([7, 8, 9], (8,), [7, 8], "stop"),
        ([7, 8, EOS], (), [7, 8, EOS], "stop"),
    ],
)
async def test_script_is_cut_where_an_engine_would_stop(
    script: list[int], stop: tuple[int, ...], expected: list[int], finish_reason: str
) -> None:
    engine = ScriptedEngine(100, EOS, script=lambda request: np.array(script, dtype=np.int32))
    reply = await engine.generate(ask(max_tokens=3, stop=stop))
    assert (reply.token_ids.numpy().tolist(), reply.finish_reason) == (expected, finish_reason)


async def test_script_outside_the_vocabulary_is_an_invalid_response() -> None:
    engine = ScriptedEngine(10, EOS, script=lambda request: np.array([99], dtype=np.int32))
    with pytest.raises(InvalidResponse):
        await engine.generate(ask())


async def test_version_change_in_flight_splits_the_tokens() -> None:
    engine = ScriptedEngine(
        100, EOS, script=lambda request: np.array([7, 8, 9, EOS], dtype=np.int32), latency=lambda request, count: 0.0
    )
    task = asyncio.create_task(engine.generate(ask()))
    await asyncio.sleep(0)
    assert engine.num_running == 1
    await engine.apply_weights("manifest", 3, "digest-3")
    reply = await task
    assert reply.versions == (VersionSpan(0, 0, 2), VersionSpan(3, 2, 4))
    assert engine.num_running == 0


async def test_served_weights_follow_apply_and_never_go_back() -> None:
    engine = ScriptedEngine(100, EOS)
    await engine.apply_weights("manifest", 2, "two")
    with pytest.raises(EngineError, match="refused 1"):
        await engine.apply_weights("manifest", 1, "one")
    served = await engine.served()
    assert (served.version, served.digest) == (2, "two")


async def test_latency_is_asked_per_request() -> None:
    asked: list[int] = []
    engine = ScriptedEngine(100, EOS, latency=lambda request, count: asked.append(count) or 0.0)
    reply = await engine.generate(ask())
    assert asked == [reply.token_ids.shape[0]]


def configured(tokenizer: Tokenizer, **settings: object) -> ScriptedEngine:
    return from_config(ScriptedEngineConfig.model_validate(settings), tokenizer)


async def texts(engine: ScriptedEngine, tokenizer: Tokenizer, count: int = 200) -> list[str]:
    return [tokenizer.decode((await engine.generate(ask(seed=seed))).token_ids.numpy()) for seed in range(count)]


async def test_configured_replies_are_drawn_as_often_as_they_are_listed(tokenizer: Tokenizer) -> None:
    said = await texts(configured(tokenizer, replies=["yes", "no", "no"]), tokenizer)
    assert set(said) == {"yes", "no"}
    assert 0.55 < said.count("no") / len(said) < 0.8


async def test_configured_replies_depend_on_the_seed_and_not_on_the_version(tokenizer: Tokenizer) -> None:
    engine = configured(tokenizer, replies=["yes", "no"])
    before = await texts(engine, tokenizer)
    await engine.apply_weights("manifest", 7, "seven")
    assert await texts(engine, tokenizer) == before
    assert await texts(configured(tokenizer, replies=["yes", "no"], seed=1), tokenizer) != before


async def test_without_configured_replies_the_tokens_are_random(tokenizer: Tokenizer) -> None:
    assert len(set(await texts(configured(tokenizer), tokenizer))) > 100


async def test_configured_latency_is_drawn_per_request_and_repeats(tokenizer: Tokenizer) -> None:
    latency = log_normal(ScriptedEngineConfig(latency_s=0.2, latency_spread=0.5))
    drawn = [latency(ask(seed=seed), 1) for seed in range(400)]
    assert drawn == [latency(ask(seed=seed), 1) for seed in range(400)]
    assert 0.17 < float(np.median(drawn)) < 0.23
    assert 0.45 < float(np.std(np.log(drawn))) < 0.55
    assert {log_normal(ScriptedEngineConfig(latency_s=0.2))(ask(seed=seed), 1) for seed in range(9)} == {0.2}


VOCAB_SIZE = 50

REQUEST = GenerateRequest(request_id="r", token_ids=EncodedTensor.of(np.zeros(3, np.int32)), max_tokens=4)

replace = msgspec.structs.replace


def floats(*values: float) -> EncodedTensor:
    return EncodedTensor.of(np.array(values, dtype=np.float32))


def ints(*values: int) -> EncodedTensor:
    return EncodedTensor.of(np.array(values, dtype=np.int32))


BROKEN: dict[str, Callable[[GenerateReply], GenerateReply]] = {
    "another request": lambda reply: replace(reply, request_id="other"),
    "but 2 log probabilities": lambda reply: replace(reply, logprobs=floats(-1, -1)),
    "0 tokens": lambda reply: replace(reply, token_ids=ints(), logprobs=floats(), versions=()),
    "5 tokens": lambda reply: make_reply([1] * 5),
    "outside the vocabulary of 50": lambda reply: replace(reply, token_ids=ints(1, 50, 2)),
    "outside the vocabulary": lambda reply: replace(reply, token_ids=ints(1, -1, 2)),
    "not finite": lambda reply: replace(reply, logprobs=floats(-1, float("nan"), -1)),
    "numbers <= 0": lambda reply: replace(reply, logprobs=floats(-1, 0.5, -1)),
    "finite": lambda reply: replace(reply, logprobs=floats(-1, float("-inf"), -1)),
    "must be a int32 vector": lambda reply: replace(reply, token_ids=EncodedTensor.of(np.zeros(3, np.int64))),
    "must be a float32 vector": lambda reply: replace(reply, logprobs=EncodedTensor.of(np.zeros((3, 1), np.float32))),
    "bytes": lambda reply: replace(reply, token_ids=EncodedTensor("int32", (3,), memoryview(b"1234"))),
    "spans": lambda reply: replace(reply, versions=()),
    "do not cover": lambda reply: replace(reply, versions=(VersionSpan(0, 0, 2),)),
    "in order": lambda reply: replace(reply, versions=(VersionSpan(0, 1, 3),)),
    "cover": lambda reply: replace(reply, versions=(VersionSpan(0, 0, 3), VersionSpan(1, 3, 3))),
    "version": lambda reply: replace(reply, versions=(VersionSpan(-1, 0, 3),)),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_reply_that_breaks_the_contract_is_invalid(complaint: str) -> None:
    reply = BROKEN[complaint](make_reply([1, 2, 3]))
    with pytest.raises(InvalidResponse, match=complaint):
        check_reply(REQUEST, reply, VOCAB_SIZE)


def test_sound_reply_is_returned() -> None:
    reply = make_reply([0, 49], versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)))
    assert check_reply(REQUEST, reply, VOCAB_SIZE) is reply


def test_log_probability_that_rounds_above_zero_is_accepted() -> None:
    reply = replace(make_reply([1]), logprobs=floats(5e-7))
    assert check_reply(REQUEST, reply, VOCAB_SIZE) is reply


def test_aborted_reply_is_the_engines_failure_and_not_invalid() -> None:
    with pytest.raises(EngineError, match="aborted") as caught:
        check_reply(REQUEST, replace(make_reply([1]), finish_reason="abort"), VOCAB_SIZE)
    assert not isinstance(caught.value, InvalidResponse)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 60), max_size=6),
    logprobs=st.lists(st.floats(-5, 1, width=32) | st.sampled_from([float("nan"), float("inf")]), max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 6)), max_size=3),
)
def test_accepted_replies_are_always_trainable(ids: list[int], logprobs: list[float], spans: list) -> None:
    reply = GenerateReply(
        request_id="r",
        token_ids=ints(*ids),
        logprobs=floats(*logprobs),
        finish_reason="stop",
        versions=tuple(VersionSpan(*span) for span in spans),
    )
    try:
        check_reply(REQUEST, reply, VOCAB_SIZE)
    except InvalidResponse:
        return
    assert 1 <= len(ids) <= REQUEST.max_tokens
    assert len(ids) == len(logprobs)
    assert all(0 <= token < VOCAB_SIZE for token in ids)
    assert all(np.isfinite(value) and value <= 1e-5 for value in logprobs)
    assert [i for _, start, end in spans for i in range(start, end)] == list(range(len(ids)))
