"""The decoder under random schedules: whatever joins, leaves, is aborted or swapped, every token is exact.

Attention over slots against attention written out, for every sharing of key/value heads.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.api.generation import Completion, Job
from inference.config import ServedModelConfig
from inference.torch_engine.attention import Decode, Prefill, SlotCache, slot_attention
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


NUM_SLOTS, CACHE_LENGTH, SIZE = 5, 16, 8

SCALING = 0.3


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One position `query[H, D]` over `keys[G, T, D]`, head by head."""
    per_group = len(query) // len(keys)
    heads = []
    for head, row in enumerate(query):
        group = head // per_group
        weights = torch.softmax(keys[group] @ row * SCALING, dim=0)
        heads.append(weights @ values[group])
    return torch.stack(heads)


def tensors(batch: int, heads: int, length: int, seed: int) -> Tensor:
    return torch.randn(batch, heads, length, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_prefill_is_causal_attention_and_fills_its_slots(heads: int, groups: int) -> None:
    cache = SlotCache(NUM_SLOTS, CACHE_LENGTH)
    slots = torch.tensor([3, 0])
    query, key, value = tensors(2, heads, 6, 0), tensors(2, groups, 6, 1), tensors(2, groups, 6, 2)
    out = Prefill(cache, slots).attend(0, query, key, value, SCALING)
    assert out.shape == (2, 6, heads, SIZE)
    for row in range(2):
        for position in range(6):
            seen = slice(position + 1)
            expected = attention(query[row, :, position], key[row, :, seen], value[row, :, seen])
            torch.testing.assert_close(out[row, position], expected, atol=1e-5, rtol=0)
    keys, values = cache.layer(0, key, value)
    torch.testing.assert_close(keys[slots, :, :6], key)
    torch.testing.assert_close(values[slots, :, :6], value)
    assert not keys[[1, 2, 4]].any()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_decode_sees_its_own_slot_up_to_its_own_position(heads: int, groups: int) -> None:
    cache = SlotCache(NUM_SLOTS, CACHE_LENGTH)
    history_keys, history_values = tensors(3, groups, 9, 1), tensors(3, groups, 9, 2)
    Prefill(cache, torch.arange(3)).attend(0, tensors(3, heads, 9, 0), history_keys, history_values, SCALING)
    positions = [0, 4, 9]
    query, key, value = tensors(3, heads, 1, 3), tensors(3, groups, 1, 4), tensors(3, groups, 1, 5)
    out = Decode(cache, torch.tensor(positions), 10).attend(0, query, key, value, SCALING)
    assert out.shape == (3, 1, heads, SIZE)
    for row, position in enumerate(positions):
        keys = torch.cat([history_keys[row, :, :position], key[row]], dim=1)
        values = torch.cat([history_values[row, :, :position], value[row]], dim=1)
        torch.testing.assert_close(out[row, 0], attention(query[row, :, 0], keys, values), atol=1e-5, rtol=0)


def test_garbage_of_padding_and_of_former_tenants_is_never_seen() -> None:
    cache = SlotCache(NUM_SLOTS, CACHE_LENGTH)
    poison = torch.full((1, 2, CACHE_LENGTH, SIZE), 1e6)
    Prefill(cache, torch.tensor([0])).attend(0, tensors(1, 2, CACHE_LENGTH, 0), poison, poison, SCALING)
    key, value = tensors(1, 2, 3, 1), tensors(1, 2, 3, 2)
    Prefill(cache, torch.tensor([0])).attend(0, tensors(1, 2, 3, 3), key, value, SCALING)
    query, new_key, new_value = tensors(1, 2, 1, 4), tensors(1, 2, 1, 5), tensors(1, 2, 1, 6)
    out = Decode(cache, torch.tensor([3]), CACHE_LENGTH).attend(0, query, new_key, new_value, SCALING)
    expected = attention(
        query[0, :, 0], torch.cat([key[0], new_key[0]], dim=1), torch.cat([value[0], new_value[0]], dim=1)
    )
    torch.testing.assert_close(out[0, 0], expected, atol=1e-5, rtol=0)


def test_layers_are_apart_and_may_have_different_shapes() -> None:
    cache = SlotCache(2, CACHE_LENGTH)
    step = Decode(cache, torch.tensor([0, 0]), 1)
    first = step.attend(0, tensors(2, 4, 1, 0), tensors(2, 2, 1, 1), tensors(2, 2, 1, 2), SCALING)
    second = step.attend(1, tensors(2, 4, 1, 3), tensors(2, 4, 1, 4), tensors(2, 4, 1, 5), SCALING)
    torch.testing.assert_close(first[:, 0], tensors(2, 2, 1, 2)[:, :, 0].repeat_interleave(2, dim=1))
    torch.testing.assert_close(second[:, 0], tensors(2, 4, 1, 5)[:, :, 0])


def test_bfloat16_softmax_is_done_in_float32() -> None:
    cache = SlotCache(1, CACHE_LENGTH)
    query, key, value = (tensors(1, 2, 8, seed).bfloat16() for seed in (0, 1, 2))
    Prefill(cache, torch.tensor([0])).attend(0, query, key, value, SCALING)
    out = Decode(cache, torch.tensor([7]), 8).attend(0, query[:, :, -1:], key[:, :, -1:], value[:, :, -1:], SCALING)
    assert out.dtype == torch.bfloat16
    expected = attention(query[0, :, -1].float(), key[0].float(), value[0].float())
    torch.testing.assert_close(out[0, 0].float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"softcap": 30.0}, "softcap"), ({"s_aux": torch.zeros(2)}, "s_aux"), ({"sliding_window": 15}, "slides over 15")],
)
def test_options_that_change_the_arithmetic_are_refused(options: dict[str, object], reason: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    slots = Prefill(SlotCache(1, CACHE_LENGTH), torch.tensor([0]))
    key = tensors(1, 2, 4, 0)
    with pytest.raises(ValueError, match=reason):
        slot_attention(module, key, key, key, None, scaling=1.0, slots=slots, **options)
    wide_enough = slot_attention(module, key, key, key, None, scaling=1.0, slots=slots, sliding_window=CACHE_LENGTH)
    assert wide_enough[0].shape == (1, 4, 2, SIZE)


def test_copy_moves_only_the_asked_positions() -> None:
    cache = SlotCache(3, CACHE_LENGTH)
    key = tensors(1, 2, 6, 0)
    keys, values = cache.layer(0, key, key)
    keys[0, :, :6], values[0, :, :6] = key[0], -key[0]
    cache.copy(torch.tensor([0]), torch.tensor([1, 2]), 4)
    for target in (1, 2):
        torch.testing.assert_close(keys[target, :, :4], key[0, :, :4])
        torch.testing.assert_close(values[target, :, :4], -key[0, :, :4])
        assert not keys[target, :, 4:].any()
    assert keys.shape == values.shape == (3, 2, CACHE_LENGTH, SIZE)
