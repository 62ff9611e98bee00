"""Attention over slots against attention written out, for every sharing of key/value heads."""

import pytest
import torch
from torch import Tensor

from inference.torch_engine.attention import Decode, Prefill, SlotCache, slot_attention

SLOTS, LENGTH, SIZE = 5, 16, 8
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
    cache = SlotCache(SLOTS, LENGTH)
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
    cache = SlotCache(SLOTS, LENGTH)
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
    cache = SlotCache(SLOTS, LENGTH)
    poison = torch.full((1, 2, LENGTH, SIZE), 1e6)
    Prefill(cache, torch.tensor([0])).attend(0, tensors(1, 2, LENGTH, 0), poison, poison, SCALING)
    key, value = tensors(1, 2, 3, 1), tensors(1, 2, 3, 2)
    Prefill(cache, torch.tensor([0])).attend(0, tensors(1, 2, 3, 3), key, value, SCALING)
    query, new_key, new_value = tensors(1, 2, 1, 4), tensors(1, 2, 1, 5), tensors(1, 2, 1, 6)
    out = Decode(cache, torch.tensor([3]), LENGTH).attend(0, query, new_key, new_value, SCALING)
    expected = attention(
        query[0, :, 0], torch.cat([key[0], new_key[0]], dim=1), torch.cat([value[0], new_value[0]], dim=1)
    )
    torch.testing.assert_close(out[0, 0], expected, atol=1e-5, rtol=0)


def test_layers_are_apart_and_may_have_different_shapes() -> None:
    cache = SlotCache(2, LENGTH)
    step = Decode(cache, torch.tensor([0, 0]), 1)
    first = step.attend(0, tensors(2, 4, 1, 0), tensors(2, 2, 1, 1), tensors(2, 2, 1, 2), SCALING)
    second = step.attend(1, tensors(2, 4, 1, 3), tensors(2, 4, 1, 4), tensors(2, 4, 1, 5), SCALING)
    torch.testing.assert_close(first[:, 0], tensors(2, 2, 1, 2)[:, :, 0].repeat_interleave(2, dim=1))
    torch.testing.assert_close(second[:, 0], tensors(2, 4, 1, 5)[:, :, 0])


def test_bfloat16_softmax_is_done_in_float32() -> None:
    cache = SlotCache(1, LENGTH)
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
    slots = Prefill(SlotCache(1, LENGTH), torch.tensor([0]))
    key = tensors(1, 2, 4, 0)
    with pytest.raises(ValueError, match=reason):
        slot_attention(module, key, key, key, None, scaling=1.0, slots=slots, **options)
    wide_enough = slot_attention(module, key, key, key, None, scaling=1.0, slots=slots, sliding_window=LENGTH)
    assert wide_enough[0].shape == (1, 4, 2, SIZE)


def test_copy_moves_only_the_asked_positions() -> None:
    cache = SlotCache(3, LENGTH)
    key = tensors(1, 2, 6, 0)
    keys, values = cache.layer(0, key, key)
    keys[0, :, :6], values[0, :, :6] = key[0], -key[0]
    cache.copy(torch.tensor([0]), torch.tensor([1, 2]), 4)
    for target in (1, 2):
        torch.testing.assert_close(keys[target, :, :4], key[0, :, :4])
        torch.testing.assert_close(values[target, :, :4], -key[0, :, :4])
        assert not keys[target, :, 4:].any()
    assert keys.shape == values.shape == (3, 2, LENGTH, SIZE)
