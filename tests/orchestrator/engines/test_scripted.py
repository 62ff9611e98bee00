import asyncio

import numpy as np
import pytest

from chat.tokenizer import Tokenizer
from orchestrator.config.engines import ScriptedEngineConfig
from orchestrator.engines.protocol import Engine, EngineError, InvalidResponse
from orchestrator.engines.scripted import ScriptedEngine, from_config, log_normal
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

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
