"""Log probabilities and entropies of given tokens, without ever holding a [T, V] tensor.

Logits are computed a tile of tokens x vocabulary at a time and thrown away; backward computes them again. Extra memory
is two tiles, whatever T and V are, and a tile that stays in the processor's cache costs less time than a row of all
logits would. The softmax over a row is put together from its tiles: with the largest logit so far m, s = sum exp(x - m)
and w = sum exp(x - m) (x - m) are carried along, and log normaliser = m + log s, entropy = log s - w / s.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Scratch = Callable[[Tensor], Tensor]
"""Gives a buffer of the shape of its argument, to be overwritten."""


class TileSize(NamedTuple):
    """Tokens and entries of the vocabulary that are computed together."""

    tokens: int
    vocabulary: int


CACHE_TILE = TileSize(512, 2048)
"""4 MiB of float32: a CPU's cache holds two of them."""
DEVICE_TILE = TileSize(2048, 16384)
"""128 MiB of float32: enough work for each kernel that is started on a GPU."""


class TokenScores(NamedTuple):
    """Scores of L tokens. A tuple, because FSDP looks for the tensors of a module's output inside it."""

    logprobs: Tensor
    """float32[L]."""
    entropies: Tensor
    """float32[L]."""
    states: Tensor | None = None
    """[L, H]: the hidden states that predict the tokens, with gradient; for a value head on the same trunk."""


def token_scores(
    hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor, tile: TileSize | None = None
) -> TokenScores:
    """Scores of `labels` [L] under softmax(hidden [L, H] @ head [V, H]^T / temperatures [L])."""
    if tile is None:
        tile = CACHE_TILE if hidden.device.type == "cpu" else DEVICE_TILE
    logprobs, entropies = _TiledHead.apply(hidden, head, labels, temperatures, tile)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropies)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor, tile: TileSize
    ) -> tuple[Tensor, Tensor]:
        softmax = _RunningSoftmax(len(labels), hidden.device)
        tiles = _Tiles(hidden, head, temperatures, tile)
        for tokens, vocabulary in tiles:
            softmax.add(tiles.logits(tokens, vocabulary), tokens, vocabulary.start, labels[tokens], tiles.scratch)
        # Three tensors, not views of one: FSDP hooks the outputs of a module and cannot follow views.
        normalisers, entropies = softmax.log_normalisers(), softmax.entropies()
        ctx.save_for_backward(hidden, head, labels, temperatures, normalisers, entropies)
        ctx.tile = tile
        ctx.set_materialize_grads(False)
        return softmax.label_logits - normalisers, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprobs_grad: Tensor | None, entropies_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, labels, temperatures, normalisers, entropies = ctx.saved_tensors
        # Summed in float32: a sum over thousands of tiles in half precision would lose the small ones.
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        head_grad = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        slopes = _Slopes.of(logprobs_grad, entropies_grad, entropies, temperatures)
        tiles = _Tiles(hidden, head, temperatures, ctx.tile)
        for tokens, vocabulary in tiles:
            log_probabilities = tiles.logits(tokens, vocabulary).sub_(normalisers[tokens, None])
            grad = slopes.logits_grad(log_probabilities, tokens, vocabulary.start, labels[tokens], tiles.scratch)
            _add_product(hidden_grad[tokens], grad, head[vocabulary])
            if head_grad is not None:
                _add_product(head_grad[vocabulary], grad.T, hidden[tokens])
        return hidden_grad.to(hidden.dtype), None if head_grad is None else head_grad.to(head.dtype), None, None, None


class _Tiles:
    """Walks over tiles, tokens first, so that a part of the head is read from memory once. One buffer for all."""

    def __init__(self, hidden: Tensor, head: Tensor, temperatures: Tensor, tile: TileSize) -> None:
        self._hidden, self._head, self._temperatures = hidden, head, temperatures[:, None].float()
        self._tile = TileSize(max(1, min(tile.tokens, len(hidden))), min(tile.vocabulary, len(head)))
        size = self._tile.tokens * self._tile.vocabulary
        self._buffer, self._scratch = (hidden.new_empty(size, dtype=torch.float32) for _ in range(2))

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for start in range(0, len(self._head), self._tile.vocabulary):
            vocabulary = slice(start, min(start + self._tile.vocabulary, len(self._head)))
            for first in range(0, len(self._hidden), self._tile.tokens):
                yield slice(first, min(first + self._tile.tokens, len(self._hidden))), vocabulary

    def logits(self, tokens: slice, vocabulary: slice) -> Tensor:
        """float32 logits of a tile at their temperatures, valid until the next call."""
        hidden, head = self._hidden[tokens], self._head[vocabulary]
        logits = self._buffer[: len(hidden) * len(head)].view(len(hidden), len(head))
        if _multiplies_halves(head):
            torch.mm(hidden, head.T, out_dtype=torch.float32, out=logits)
        else:
            torch.mm(hidden.float(), head.T.float(), out=logits)
        return logits.div_(self._temperatures[tokens])

    def scratch(self, like: Tensor) -> Tensor:
        """Room of the same shape, valid until the next call."""
        return self._scratch[: like.numel()].view_as(like)


class _RunningSoftmax:
    """float32[L] each: what is known of the softmax of a token from the tiles that were added."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        lowest = torch.finfo(torch.float32).min
        self._largest = torch.full((num_tokens,), lowest, device=device)
        self._sums, self._weighted, self.label_logits = (torch.zeros(num_tokens, device=device) for _ in range(3))

    def add(self, logits: Tensor, tokens: slice, first: int, labels: Tensor, scratch: Scratch) -> None:
        """Count the logits of `tokens` for the entries of the vocabulary from `first`. Overwrites them."""
        places = labels - first
        has_label = (places >= 0) & (places < logits.shape[1])
        picked = logits.gather(-1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.label_logits[tokens] = torch.where(has_label, picked, self.label_logits[tokens])
        largest = torch.maximum(self._largest[tokens], logits.amax(-1))
        shift = self._largest[tokens] - largest
        shrink = shift.exp()
        distances = logits.sub_(largest[:, None])
        powers = torch.exp(distances, out=scratch(distances))
        weighted = (self._weighted[tokens] + self._sums[tokens] * shift) * shrink
        self._weighted[tokens] = weighted + torch.linalg.vecdot(powers, distances)
        self._sums[tokens] = self._sums[tokens] * shrink + powers.sum(-1)
        self._largest[tokens] = largest

    def log_normalisers(self) -> Tensor:
        """Logarithm of the sum of all exponentials."""
        return self._largest + self._sums.log()

    def entropies(self) -> Tensor:
        """In nats."""
        return self._sums.log() - self._weighted / self._sums


class _Slopes(NamedTuple):
    """float32[L] each, already divided by the temperature, so that the gradient of the logit of entry j is

        [j is the label] own + p_j (constant + by_log log p_j)

    from d logprob / d logit_j = [j is the label] - p_j and d entropy / d logit_j = -p_j (log p_j + entropy).
    """

    own: Tensor | None
    constant: Tensor
    by_log: Tensor | None

    @classmethod
    def of(
        cls, logprobs_grad: Tensor | None, entropies_grad: Tensor | None, entropies: Tensor, temperatures: Tensor
    ) -> "_Slopes":
        own = None if logprobs_grad is None else logprobs_grad / temperatures
        by_log = None if entropies_grad is None else -entropies_grad / temperatures
        constant = torch.zeros_like(entropies) if by_log is None else by_log * entropies
        return cls(own, constant if own is None else constant - own, by_log)

    def logits_grad(
        self, log_probabilities: Tensor, tokens: slice, first: int, labels: Tensor, scratch: Scratch
    ) -> Tensor:
        """Gradient of a tile of logits. Overwrites `log_probabilities`."""
        if self.by_log is None:
            grad = log_probabilities.exp_().mul_(self.constant[tokens, None])
        else:
            probabilities = torch.exp(log_probabilities, out=scratch(log_probabilities))
            grad = log_probabilities.mul_(self.by_log[tokens, None]).add_(self.constant[tokens, None])
            grad = grad.mul_(probabilities)
        if self.own is not None:
            places = labels - first
            has_label = (places >= 0) & (places < grad.shape[1])
            own = torch.where(has_label, self.own[tokens], 0.0)
            grad.scatter_add_(-1, places.clamp(0, grad.shape[1] - 1)[:, None], own[:, None])
        return grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, in float32 whatever the factors are."""
    if _multiplies_halves(right):
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=torch.float32))
    else:
        total.addmm_(left.float(), right.float())


def _multiplies_halves(factor: Tensor) -> bool:
    """Whether this device sums products of half-precision factors in float32, and gives the sum as it is.

    Elsewhere the factors are widened first: a logit that is rounded to bfloat16 is wrong by up to 0.4 %.
    """
    return factor.is_cuda and factor.dtype != torch.float32
