"""Logits to tokens: temperature, top-p and an inverse-CDF draw, for a whole batch at once.

Shapes: B sequences, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.api.arrays import Float64s, Floats, UInt64s
from transport.wire.tensor import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48
"""Resolution of a draw. Below 53, so that `u * total < total` holds in float64 for every `u < 1`."""


class Sampled(NamedTuple):
    """The tokens of one decode step and their log probabilities."""

    tokens: Tensor
    """int64[B]."""
    logprobs: Tensor
    """float32[B] of the sampled tokens, at the row's temperature, before top-p truncation."""
    all_logprobs: Tensor
    """float32[B, V], the distribution `logprobs` was read from."""


def sample(logits: Tensor, temperature: Floats, top_p: Floats, uniform: Float64s) -> Sampled:
    """Row `i` is greedy where `temperature[i]` is 0, else drawn with `uniform[i]` in [0, 1) by inverse CDF.

    What steers the rows is on the host: which work they need is known without waiting for the device. A row with a NaN
    gets some valid token and a non-finite log probability: the caller decides what that means.
    """
    all_logprobs = torch.log_softmax(_tempered(logits.float(), temperature), dim=-1)
    tokens = _draw(_truncate(all_logprobs.double().exp(), top_p), _like(uniform, logits))
    greedy = temperature == 0
    if greedy.any():
        tokens = torch.where(_like(greedy, logits), all_logprobs.argmax(dim=-1), tokens)
    return Sampled(tokens, all_logprobs.gather(1, tokens[:, None])[:, 0], all_logprobs)


def _tempered(logits: Tensor, temperature: Floats) -> Tensor:
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    return logits if (divisor == 1).all() else logits / _like(divisor, logits)[:, None]


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the draw; tokens of probability 0 are never first."""
    cdf = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)


def _truncate(probs: Tensor, top_p: Floats) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches `top_p`. Rows with `top_p` 1 stay whole."""
    narrowed = np.flatnonzero(top_p < 1)
    if len(narrowed) == 0:
        return probs
    rows = _like(narrowed, probs)
    ordered, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(mass_before < _like(top_p[narrowed], probs)[:, None], ordered, 0.0)
    return probs.index_copy(0, rows, torch.zeros_like(kept).scatter_(1, order, kept))


def _like(array: Array, tensor: Tensor) -> Tensor:
    """`array` on the device of `tensor`."""
    return torch.from_numpy(array).to(tensor.device)


def counter_uniforms(seeds: UInt64s, indices: UInt64s) -> Float64s:
    """Draw number `indices[i]` of the stream `seeds[i]`, in [0, 1)."""
    bits = _mix(_mix(seeds + _GOLDEN) + indices * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def stream_seed(base: int, number: int) -> int:
    """Seed of the `number`-th request that brought none, for a server with seed `base`."""
    mixed = _mix(np.array([base], dtype=np.uint64) + _GOLDEN) ^ np.array([number], dtype=np.uint64)
    return int(_mix(mixed)[0])


def _mix(x: UInt64s) -> UInt64s:
    """The SplitMix64 finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
