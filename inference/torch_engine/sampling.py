"""Logits to tokens: temperature, top-p and an inverse-CDF draw, for a whole batch at once.

Shapes: B sequences, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sampled(NamedTuple):
    """One step of the batch."""

    tokens: Tensor
    """int64[B]."""
    logprobs: Tensor
    """float32[B] of the sampled tokens, at the row's temperature, before top-p truncation."""
    all_logprobs: Tensor
    """float32[B, V], the distribution `logprobs` was read from."""


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Sampled:
    """Row `i` is greedy where `temperature[i]` is 0, else drawn with `uniform[i]` in [0, 1) by inverse CDF.

    A row with a NaN gets some valid token and a non-finite log probability: the caller decides what that means.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    tokens = _draw(_truncate(all_logprobs.double().exp(), top_p), uniform)
    tokens = torch.where(greedy, all_logprobs.argmax(dim=-1), tokens)
    return Sampled(tokens, all_logprobs.gather(1, tokens[:, None])[:, 0], all_logprobs)


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the draw; tokens of probability 0 are never first."""
    cdf = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)


def _truncate(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches `top_p`. Rows with `top_p` 1 stay whole."""
    rows = (top_p < 1).nonzero()[:, 0]
    if rows.numel() == 0:
        return probs
    ordered, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(mass_before < top_p[rows, None], ordered, 0.0)
    return probs.index_copy(0, rows, torch.zeros_like(kept).scatter_(1, order, kept))
