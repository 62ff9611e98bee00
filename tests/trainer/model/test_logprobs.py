"""The tiled head equals the plain one, in values and gradients, and never holds all logits."""

import pytest
import torch
from torch import Tensor

from trainer.model.logprobs import TileSize, TokenScores, token_scores

NUM_TOKENS, HIDDEN, VOCAB = 57, 16, 101
each_tile = pytest.mark.parametrize("tile", [(5, 3), (10, 7), (57, 101), (8, 200), (256, 25)], ids=str)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    temperatures = torch.rand(NUM_TOKENS, generator=generator) + 0.5
    return hidden, head, labels, temperatures


def naive(hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor) -> TokenScores:
    distribution = (hidden.double() @ head.double().T / temperatures.double()[:, None]).log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return TokenScores(distribution.gather(-1, labels[:, None])[:, 0], entropies)


@each_tile
def test_values_equal_the_plain_head(tile: tuple[int, int]) -> None:
    scores, expected = token_scores(*inputs(), TileSize(*tile)), naive(*inputs())
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-5, atol=1e-5)


@each_tile
@pytest.mark.parametrize(("logprob_scale", "entropy_scale"), [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_gradients_equal_the_plain_head(tile: tuple[int, int], logprob_scale: float, entropy_scale: float) -> None:
    upstream = torch.linspace(-1, 2, NUM_TOKENS)

    def gradients(scores: TokenScores, hidden: Tensor, head: Tensor) -> tuple[Tensor, ...]:
        total = logprob_scale * (scores.logprobs * upstream).sum() + entropy_scale * (scores.entropies * upstream).sum()
        return torch.autograd.grad(total, (hidden, head))

    hidden, head, labels, temperatures = inputs()
    ours = gradients(token_scores(hidden, head, labels, temperatures, TileSize(*tile)), hidden, head)
    expected = gradients(naive(hidden, head, labels, temperatures), hidden, head)
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_only_logprobs_in_the_loss_give_the_gradient_of_logprobs() -> None:
    hidden, head, labels, temperatures = inputs()
    token_scores(hidden, head, labels, temperatures).logprobs.sum().backward()
    ours = hidden.grad
    hidden_again, head_again, _, _ = inputs()
    naive(hidden_again, head_again, labels, temperatures).logprobs.sum().backward()
    torch.testing.assert_close(ours, hidden_again.grad, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_scores_and_zero_gradients() -> None:
    hidden, head, labels, temperatures = inputs()
    scores = token_scores(hidden[:0], head, labels[:0], temperatures[:0])
    (scores.logprobs.sum() * 0.0).backward()
    assert scores.logprobs.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, labels, temperatures = inputs()
    token_scores(hidden, head.detach(), labels, temperatures).logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


@each_tile
def test_half_precision_inputs_give_exact_scores_and_half_precision_gradients(tile: tuple[int, int]) -> None:
    hidden, head, labels, temperatures = inputs(torch.bfloat16)
    scores, expected = token_scores(hidden, head, labels, temperatures, TileSize(*tile)), naive(*inputs(torch.bfloat16))
    assert scores.logprobs.dtype == scores.entropies.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(scores.logprobs.sum(), (hidden, head))
    theirs = torch.autograd.grad(
        naive(hidden.double(), head.double(), labels, temperatures).logprobs.sum(), (hidden, head)
    )
    for mine, exact in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact.double()).norm() <= 0.003 * exact.double().norm()


def test_no_tensor_of_all_logits_is_saved_or_made() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    hidden, head, labels, temperatures = inputs()
    with Watch():
        token_scores(hidden, head, labels, temperatures, TileSize(8, 20)).logprobs.sum().backward()
    assert largest <= VOCAB * HIDDEN < NUM_TOKENS * VOCAB


def test_large_logits_and_certain_tokens_stay_finite() -> None:
    hidden, head, labels, temperatures = inputs()
    large = (hidden.detach() * 300).requires_grad_()
    scores = token_scores(large, head, labels, temperatures, TileSize(10, 7))
    (scores.logprobs.sum() + scores.entropies.sum()).backward()
    expected = naive(large.detach(), head.detach(), labels, temperatures)
    torch.testing.assert_close(scores.logprobs.double(), expected.logprobs, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(scores.entropies.double(), expected.entropies, rtol=1e-4, atol=1e-3)
    assert large.grad is not None
    assert large.grad.isfinite().all()
