"""The decoder under random schedules: whatever joins, leaves, is aborted or swapped, every token is exact."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inference.api.generation import Completion, Job
from inference.config import ServedModelConfig
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.loading import load_slot_model
from inference.torch_engine.slots import EngineSequence
from inference.weights.publish import VerifiedWeights, model_digest, served_tensors
from tests.support.models import VOCAB_SIZE, make_model, score

SLOTS, LENGTH = 4, 64


@pytest.fixture
def decoder(model_dir: Path) -> Decoder:
    return Decoder(load_slot_model(ServedModelConfig(path=model_dir, device="cpu"), SLOTS, LENGTH), SLOTS, LENGTH)


def sequence(key: int, prompt: list[int], max_tokens: int, **options: object) -> EngineSequence:
    job = Job(prompt=np.array(prompt, dtype=np.int32), max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    limit = min(len(prompt) + max_tokens, LENGTH)
    return EngineSequence(key=key, job=job, seed=key, stop_ids=frozenset(), limit=limit)


def verified(model: PreTrainedModel, version: int) -> VerifiedWeights:
    return VerifiedWeights(version, model_digest(model), {name: t.clone() for name, t in served_tensors(model)})


def run(decoder: Decoder) -> dict[int, Completion]:
    """Step until there is no work; completions by key."""
    done: dict[int, Completion] = {}
    while decoder.has_work:
        for end in decoder.step():
            assert isinstance(end.result, Completion)
            done[end.key] = end.result
    return done


def assert_exact(
    models: dict[int, PreTrainedModel], prompt: list[int], completion: Completion, temperature: float
) -> None:
    tokens = completion.token_ids.tolist()
    assert [span.start for span in completion.versions] == [0, *[span.end for span in completion.versions[:-1]]]
    assert completion.versions[-1].end == len(tokens)
    for span in completion.versions:
        expected = score(models[span.version], prompt, tokens, temperature)[span.start : span.end]
        ours = torch.from_numpy(completion.logprobs[span.start : span.end])
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_are_exact(decoder: Decoder, model: PreTrainedModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = {0: model, 1: make_model(11), 2: make_model(12)}
    prompts: dict[int, tuple[list[int], float]] = {}
    done: dict[int, Completion] = {}
    aborted: set[int] = set()
    for turn in range(120):
        action = rng.random()
        if action < 0.35 and turn < 80:
            key = len(prompts)
            prompt = rng.integers(3, VOCAB_SIZE, size=rng.integers(1, 30)).tolist()
            temperature = float(rng.choice([0.5, 1.0, 1.5]))
            prompts[key] = (prompt, float(np.float32(temperature)))
            decoder.add(sequence(key, prompt, int(rng.integers(1, 20)), temperature=temperature))
        elif action < 0.42 and prompts:
            key = int(rng.integers(len(prompts)))
            if key not in done:
                aborted.add(key)
            decoder.abort(key)
        elif action < 0.47:
            version = int(rng.integers(3))
            assert decoder.swap(verified(models[version], version)).version == version
        else:
            assert decoder.num_running <= SLOTS
            done |= {end.key: end.result for end in decoder.step()}  # type: ignore[misc]
    done |= run(decoder)
    assert set(done) | aborted == set(prompts)
    assert not set(done) & aborted
    assert Counter(len(completion.versions) > 1 for completion in done.values())[True] >= 1
    for key, completion in done.items():
        assert_exact(models, prompts[key][0], completion, prompts[key][1])


def test_sequences_are_admitted_in_the_order_of_arrival(decoder: Decoder) -> None:
    for key in range(3 * SLOTS):
        decoder.add(sequence(key, [5, 6], max_tokens=3))
    order = []
    while decoder.has_work:
        order += sorted(end.key for end in decoder.step())
    assert order == list(range(3 * SLOTS))


def test_freed_slot_is_taken_at_the_next_step(decoder: Decoder) -> None:
    for key, num in enumerate([2, 9, 9, 9, 9]):
        decoder.add(sequence(key, [5], max_tokens=num))
    decoder.step()
    assert decoder.num_running == 4
    assert [end.key for end in decoder.step()] == [0]
    assert decoder.num_running == 3
    decoder.step()
    assert decoder.num_running == 4


def test_aborting_what_waits_runs_or_is_gone_leaves_the_rest(decoder: Decoder, model: PreTrainedModel) -> None:
    for key in range(6):
        decoder.add(sequence(key, [5 + key] * (key + 1), max_tokens=10))
    decoder.step()
    decoder.abort(1)  # running
    decoder.abort(5)  # waiting
    decoder.abort(77)  # never was
    done = run(decoder)
    assert set(done) == {0, 2, 3, 4}
    for key, completion in done.items():
        assert_exact({0: model}, [5 + key] * (key + 1), completion, 1.0)


def test_swap_with_nothing_running_is_of_the_next_sequence(decoder: Decoder) -> None:
    new = make_model(1)
    decoder.swap(verified(new, 9))
    decoder.add(sequence(0, [5, 6], max_tokens=4))
    [completion] = run(decoder).values()
    assert [span.version for span in completion.versions] == [9]
    assert_exact({9: new}, [5, 6], completion, 1.0)


def test_two_swaps_between_two_steps_leave_only_the_last(decoder: Decoder, model: PreTrainedModel) -> None:
    models = {0: model, 1: make_model(1), 2: make_model(2)}
    decoder.add(sequence(0, [5, 6, 7], max_tokens=6))
    decoder.step()
    decoder.swap(verified(models[1], 1))
    decoder.swap(verified(models[2], 2))
    [completion] = run(decoder).values()
    assert [(span.version, span.start, span.end) for span in completion.versions] == [(0, 0, 1), (2, 1, 6)]
    assert_exact(models, [5, 6, 7], completion, 1.0)


def test_sequence_runs_to_the_very_end_of_the_cache(decoder: Decoder, model: PreTrainedModel) -> None:
    prompt = [5 + i % 20 for i in range(LENGTH - 3)]
    decoder.add(sequence(0, prompt, max_tokens=100))
    [completion] = run(decoder).values()
    assert len(completion.token_ids) == 3
    assert_exact({0: model}, prompt, completion, 1.0)


def test_totals_count_what_was_done(decoder: Decoder) -> None:
    for key in range(3):
        decoder.add(sequence(key, [5, 6, 7], max_tokens=4))
    run(decoder)
    assert (decoder.num_steps, decoder.num_sampled_tokens, decoder.num_prefilled_tokens) == (4, 12, 6)
    assert decoder.step() == []
    assert decoder.num_steps == 4
