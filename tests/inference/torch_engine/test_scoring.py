"""Scoring given tokens: exact log probabilities, over HTTP, beside running requests."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient
from transformers import PreTrainedModel

from inference.api.generation import Job, ScoreJob, Scores
from inference.errors import NonFiniteLogits, QueueFull, Unavailable
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from tests.inference.conftest import running_engine
from tests.inference.gate import Gate
from tests.support.models import VOCAB_SIZE, make_model, publish, save_model, score
from transport.wire.codec import encode
from transport.wire.generation import MSGPACK, SCORE_PATH, ScoreReply, ScoreRequest
from transport.wire.sample import EncodedTensor

TOKENS = [5, 6, 7, 30, 12, 9, 9, 8]


def ids(tokens: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(tokens, dtype=np.int32)


def body(tokens: list[int] = TOKENS, **fields: float) -> bytes:
    return encode(ScoreRequest(request_id="s1", token_ids=EncodedTensor.of(ids(tokens)), **fields))


async def ask(client: TestClient, data: bytes) -> ScoreReply:
    response = await client.post(SCORE_PATH, data=data)
    assert (response.status, response.content_type) == (200, MSGPACK), await response.text()
    return msgspec.msgpack.decode(await response.read(), type=ScoreReply)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_scores_are_those_of_the_model(client: TestClient, model: PreTrainedModel, temperature: float) -> None:
    reply = await ask(client, body(temperature=temperature))
    assert (reply.request_id, reply.version, reply.logprobs.shape) == ("s1", 0, (len(TOKENS),))
    expected = score(model, TOKENS[:1], TOKENS[1:], temperature)
    assert reply.logprobs.numpy()[0] == 0.0
    torch.testing.assert_close(torch.tensor(reply.logprobs.numpy()[1:]), expected, atol=1e-5, rtol=0)


async def test_what_the_engine_sampled_is_scored_as_it_was_sampled(engine: TorchEngine) -> None:
    job = Job(prompt=ids([5, 6, 7]), max_tokens=40, temperature=0.8, seed=3)
    completion = await engine.generate(job)
    scores = await engine.score(ScoreJob(np.concatenate([job.prompt, completion.token_ids]), 0.8))
    np.testing.assert_allclose(scores.logprobs[3:], completion.logprobs, atol=1e-5)


async def test_one_token_and_the_longest_sequence_can_be_scored(client: TestClient) -> None:
    assert (await ask(client, body([5]))).logprobs.numpy().tolist() == [0.0]
    assert (await ask(client, body([5] * 256))).logprobs.shape == (256,)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (body([]), "0 tokens"),
        (body([5] * 257), "257 tokens"),
        (body([5, VOCAB_SIZE]), f"token id {VOCAB_SIZE} at position 1"),
        (body(temperature=0.0), "temperature"),
        (body(temperature=float("nan")), "temperature"),
        (b"nonsense", "not a valid ScoreRequest"),
    ],
)
async def test_bad_requests_get_a_reason(client: TestClient, data: bytes, said: str) -> None:
    response = await client.post(SCORE_PATH, data=data)
    assert response.status == 400
    assert said in (await response.json())["error"]["message"]


async def test_scoring_does_not_touch_running_requests(engine: TorchEngine) -> None:
    jobs = [Job(prompt=ids([5, 6, seed]), max_tokens=60, seed=seed) for seed in range(3, 8)]
    alone = [await engine.generate(job) for job in jobs]
    running = [asyncio.create_task(engine.generate(job)) for job in jobs]
    for _ in range(20):
        await engine.score(ScoreJob(ids(TOKENS)))
    together = await asyncio.gather(*running)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


async def test_new_weights_score_and_say_their_version(engine: TorchEngine, tmp_path: Path) -> None:
    newer = make_model(seed=1)
    await engine.apply_weights(publish(tmp_path, newer, 1), 1)
    scores = await engine.score(ScoreJob(ids(TOKENS)))
    assert scores.version == 1
    expected = score(newer, TOKENS[:1], TOKENS[1:])
    torch.testing.assert_close(torch.tensor(scores.logprobs[1:]), expected, atol=1e-5, rtol=0)


async def test_weights_that_give_no_probabilities_are_an_error_and_the_engine_lives(tmp_path: Path) -> None:
    broken = make_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[TOKENS[0]] = torch.nan
    async with running_engine(save_model(tmp_path / "sound", make_model())) as engine:
        await engine.apply_weights(publish(tmp_path, broken, 1), 1)
        with pytest.raises(NonFiniteLogits, match="version 1"):
            await engine.score(ScoreJob(ids(TOKENS)))
        assert engine.failure is None


async def test_a_crowd_is_told_to_come_back(model_dir: Path) -> None:
    async with running_engine(model_dir, max_waiting=2) as engine:
        results = await asyncio.gather(*(engine.score(ScoreJob(ids(TOKENS))) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(result, QueueFull) for result in results) == 3


async def test_a_stopped_engine_scores_nothing(model_dir: Path) -> None:
    async with running_engine(model_dir) as engine:
        await engine.stop(grace_s=1)
        with pytest.raises(Unavailable):
            await engine.score(ScoreJob(ids(TOKENS)))


async def test_every_score_is_progress_and_one_that_nobody_waits_for_is_left_out(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of teachers' sequences may take longer than `stall_timeout_s`."""
    progress: list[None] = []
    seen: list[int] = []
    decoder_score = Decoder.score

    def counted(self: Decoder, job: ScoreJob) -> Scores | NonFiniteLogits:
        seen.append(len(progress))
        return decoder_score(self, job)

    monkeypatch.setattr(Decoder, "score", counted)
    async with running_engine(model_dir, on_progress=lambda: progress.append(None)) as engine:
        gate = Gate(1)
        running = asyncio.create_task(engine.generate(Job(prompt=ids([5]), max_tokens=1, should_stop=gate)))
        await asyncio.to_thread(gate.reached.wait, 30)
        waiting = [asyncio.create_task(engine.score(ScoreJob(ids(TOKENS)))) for _ in range(20)]
        await asyncio.sleep(0)
        for task in waiting[:15]:
            task.cancel()
        await asyncio.wait(waiting[:15])
        gate.opened.set()
        await asyncio.gather(*waiting[15:], running)
    assert len(seen) == len(set(seen)) == 5
