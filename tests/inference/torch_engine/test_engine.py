"""The engine against plain Hugging Face calls: same log probabilities, whatever the batch does; stop, and death.

What a client can see of it is in the contract suite.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.api.generation import Completion, Job, ScoreJob
from inference.errors import Unavailable
from inference.torch_engine.engine import TorchEngine
from tests.inference.conftest import running_engine
from tests.inference.gate import Gate, held
from tests.support.models import EOS, VOCAB_SIZE, make_model, save_model, score
from tests.support.waiting import until_async


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths, from one token on."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, size=1 + 5 * i % 37).tolist() for i in range(num)]


def job(prompt: list[int], max_tokens: int = 24, **options: object) -> Job:
    return Job(prompt=np.array(prompt, dtype=np.int32), max_tokens=max_tokens, **options)  # type: ignore[arg-type]


async def run_all(engine: TorchEngine, jobs: list[Job]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(one) for one in jobs))


def assert_scored(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    expected = score(model, prompt, completion.token_ids.tolist(), temperature)
    torch.testing.assert_close(torch.from_numpy(completion.logprobs), expected, atol=1e-5, rtol=0)


async def test_logprobs_are_those_of_a_plain_forward(engine: TorchEngine, model: PreTrainedModel) -> None:
    asked = prompts(20)  # more than slots: some join when others leave
    completions = await run_all(engine, [job(prompt, temperature=0.6) for prompt in asked])
    for prompt, completion in zip(asked, completions, strict=True):
        assert completion.token_ids.shape == completion.logprobs.shape == (24,)
        assert completion.logprobs.dtype == np.float32
        assert completion.token_ids.dtype == np.int32
        assert_scored(model, prompt, completion, 0.6)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", False)])
async def test_other_models_are_exact_too(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(3, family=family, tied=tied)
    async with running_engine(save_model(tmp_path / "model", model)) as engine:
        asked = prompts(6)
        for prompt, completion in zip(asked, await run_all(engine, [job(p) for p in asked]), strict=True):
            assert_scored(model, prompt, completion)


async def test_seed_gives_the_same_tokens_whatever_the_company(engine: TorchEngine) -> None:
    [lonely] = await run_all(engine, [job([5, 6, 7], seed=42)])
    crowd = [job(prompt, 5 + 3 * i) for i, prompt in enumerate(prompts(11, seed=1))]
    crowded = (await run_all(engine, [*crowd[:5], job([5, 6, 7], seed=42), *crowd[5:]]))[5]
    np.testing.assert_array_equal(lonely.token_ids, crowded.token_ids)
    np.testing.assert_allclose(lonely.logprobs, crowded.logprobs, atol=1e-5)


async def test_same_prompts_are_prefilled_once_and_stay_exact(engine: TorchEngine, model: PreTrainedModel) -> None:
    prompt = prompts(8)[7]
    completions = await run_all(engine, [job(prompt) for _ in range(8)])
    for completion in completions:
        assert_scored(model, prompt, completion)


async def test_top_p_restricts_the_choice_but_not_the_logprobs(engine: TorchEngine, model: PreTrainedModel) -> None:
    prompt = [5, 9, 11]
    [completion] = await run_all(engine, [job(prompt, 40, top_p=0.3, seed=1)])
    assert_scored(model, prompt, completion)
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        probs = model(ids).logits[0, 2:-1].softmax(-1)
    for row, token in zip(probs, completion.token_ids.tolist(), strict=True):
        assert row[row > row[token]].sum() < 0.3 + 1e-5


async def test_end_of_sequence_ids_of_the_model_stop(model_dir: Path) -> None:
    async with running_engine(model_dir, eos=True) as engine:
        completions = await run_all(engine, [job([5], 200, seed=seed) for seed in range(8)])
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert stopped
    assert all(completion.token_ids[-1] == EOS for completion in stopped)
    assert all(EOS not in completion.token_ids[:-1] for completion in completions)


async def test_top_logprobs_are_the_likeliest_tokens(engine: TorchEngine, model: PreTrainedModel) -> None:
    prompt = [7, 8, 9]
    three, none = await run_all(engine, [job(prompt, 5, num_top_logprobs=3, seed=1), job(prompt, 5, seed=1)])
    assert none.top_logprobs == ()
    assert len(three.top_logprobs) == 5
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *three.token_ids.tolist()]])
        expected = model(ids).logits[0, 2:-1].log_softmax(-1).topk(3)
    for row, top in enumerate(three.top_logprobs):
        assert top.token_ids.tolist() == expected.indices[row].tolist()
        np.testing.assert_allclose(top.logprobs, expected.values[row], atol=1e-5)


async def test_cancelled_request_frees_its_slot(model_dir: Path) -> None:
    async with running_engine(model_dir, slots=1) as engine:
        async with held(engine):
            abandoned = asyncio.create_task(engine.generate(job([5], 200)))
            await asyncio.sleep(0)
            queued = asyncio.create_task(engine.generate(job([6], 4)))
            await asyncio.sleep(0)
            assert engine.stats.waiting == 2
            abandoned.cancel()
            await asyncio.wait([abandoned], timeout=60)
        assert len((await asyncio.wait_for(queued, 60)).token_ids) == 4
        assert engine.stats.sampled_tokens == 1 + 4
        assert engine.stats.running == engine.stats.waiting == 0


async def test_running_request_can_be_cancelled_among_others(engine: TorchEngine, model: PreTrainedModel) -> None:
    asked = prompts(6)
    tasks = [asyncio.create_task(engine.generate(job(prompt, 60))) for prompt in asked]
    await until_async(lambda: engine.stats.sampled_tokens >= 60, 60)
    tasks[0].cancel()
    tasks[3].cancel()
    for i in (1, 2, 4, 5):
        assert_scored(model, asked[i], await asyncio.wait_for(tasks[i], 60))


async def test_stop_ends_what_does_not_finish_in_time(model_dir: Path) -> None:
    async with running_engine(model_dir) as engine:
        gate = Gate(1)
        task = asyncio.create_task(engine.generate(job([5], 3, should_stop=gate)))
        await asyncio.to_thread(gate.reached.wait, 30)
        stop = asyncio.create_task(engine.stop(grace_s=0.1))
        with pytest.raises(Unavailable, match="stopping"):
            await task
        with pytest.raises(Unavailable, match="stopping"):
            await engine.generate(job([5], 3))
        gate.opened.set()
        await stop


async def test_stop_lets_requests_in_flight_finish(model_dir: Path) -> None:
    async with running_engine(model_dir) as engine:
        task = asyncio.create_task(engine.generate(job([5], 50)))
        await asyncio.sleep(0)
        await engine.stop(grace_s=10)
        assert len((await task).token_ids) == 50


async def test_death_of_the_engine_fails_every_request_with_the_reason(engine: TorchEngine) -> None:
    def explode(sampled: object) -> bool:
        raise RuntimeError("out of memory")

    others = [asyncio.create_task(engine.generate(job([5], 200))) for _ in range(3)]
    results = await asyncio.gather(engine.generate(job([5], 20, should_stop=explode)), *others, return_exceptions=True)
    assert all(isinstance(result, Unavailable) and "out of memory" in str(result) for result in results)
    await asyncio.wait_for(engine.ended(), 5)
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(Unavailable, match="died"):
        await engine.generate(job([5], 3))
    with pytest.raises(Unavailable, match="died"):
        await engine.score(ScoreJob(np.array([5, 6], dtype=np.int32)))


async def test_idle_engine_shows_that_it_lives(model_dir: Path) -> None:
    signs: list[None] = []
    async with running_engine(model_dir, on_progress=lambda: signs.append(None)):
        seen = len(signs)
        await until_async(lambda: len(signs) >= seen + 2, 60)
