"""Log probabilities and entropies of given tokens, without ever holding a [T, V] tensor.

The head is applied to a chunk of tokens at a time and the logits are thrown away; backward computes them again.
Extra memory is `chunk x V`, whatever T is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 256


class TokenScores(NamedTuple):
    """Of L tokens. A tuple, because FSDP looks for the tensors of a module's output inside it."""

    logprobs: Tensor
    """float32[L]."""
    entropies: Tensor
    """float32[L]."""
    states: Tensor | None = None
    """[L, H]: the hidden states that predict the tokens, with gradient; for a value head on the same trunk."""


def token_scores(
    hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor, chunk_tokens: int = CHUNK_TOKENS
) -> TokenScores:
    """Scores of `labels` [L] under softmax(hidden [L, H] @ head [V, H]^T / temperatures [L])."""
    logprobs, entropies = _ChunkedHead.apply(hidden, head, labels, temperatures, chunk_tokens)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropies)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        # Three tensors, not views of one: FSDP hooks the outputs of a module and cannot follow views.
        log_normalisers, logprobs, entropies = (hidden.new_empty(len(labels), dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(len(labels), chunk_tokens):
            logits = _logits(hidden[chunk], head, temperatures[chunk])
            normaliser = logits.logsumexp(-1)
            log_probabilities = logits.sub_(normaliser[:, None])
            log_normalisers[chunk] = normaliser
            logprobs[chunk] = log_probabilities.gather(-1, labels[chunk, None])[:, 0]
            entropies[chunk] = -torch.linalg.vecdot(log_probabilities.exp(), log_probabilities)
        ctx.save_for_backward(hidden, head, labels, temperatures, log_normalisers, entropies)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_grad: Tensor | None, entropies_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, labels, temperatures, log_normalisers, entropies = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        # Summed in float32: a sum over thousands of chunks in half precision would lose the small ones.
        head_grad = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(labels), ctx.chunk_tokens):
            shifted = _logits(hidden[chunk], head, temperatures[chunk]).sub_(log_normalisers[chunk, None])
            logits_grad = _logits_grad(
                shifted,
                labels[chunk],
                entropies[chunk],
                None if logprobs_grad is None else logprobs_grad[chunk],
                None if entropies_grad is None else entropies_grad[chunk],
            )
            logits_grad = logits_grad.div_(temperatures[chunk, None]).to(head.dtype)
            hidden_grad[chunk] = logits_grad @ head
            if head_grad is not None:
                head_grad += logits_grad.T @ hidden[chunk]
        return hidden_grad, None if head_grad is None else head_grad.to(head.dtype), None, None, None


def _logits_grad(
    log_probabilities: Tensor,
    labels: Tensor,
    entropies: Tensor,
    logprobs_grad: Tensor | None,
    entropies_grad: Tensor | None,
) -> Tensor:
    """d logprob / d logit_j = [j is the label] - p_j; d entropy / d logit_j = -p_j (log p_j + entropy).

    Overwrites `log_probabilities`.
    """
    probabilities = log_probabilities.exp()
    if entropies_grad is None:
        grad = log_probabilities.zero_()
    else:
        grad = log_probabilities.add_(entropies[:, None]).mul_(probabilities).mul_(-entropies_grad[:, None])
    if logprobs_grad is not None:
        grad.addcmul_(probabilities, logprobs_grad[:, None], value=-1)
        grad.scatter_add_(-1, labels[:, None], logprobs_grad[:, None])
    return grad


def _logits(hidden: Tensor, head: Tensor, temperatures: Tensor) -> Tensor:
    return (hidden @ head.T).float().div_(temperatures[:, None])


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]
