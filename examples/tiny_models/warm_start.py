"""Supervised warm start: just enough right answers that a sparse reward has something to find.

The share of answers that would be sampled exactly right at temperature 1 needs no sampling: it is the mean probability
of the right answer, which the training step has at hand.

Shapes: B prompts, P prompt tokens, A answer tokens (the answer and the end marker). All texts of a text puzzle are
equally long, so that nothing is padded.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

from text_puzzle import TextPuzzle
from tiny_models.errors import WarmStartError

BATCH_SIZE = 64
LEARNING_RATE = 2e-3
MAX_STEPS = 400  # 0.2 takes 50 to 90 steps


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the warm start stands."""

    step: int
    """Optimizer steps taken."""
    loss: float
    """Mean negative log probability of an answer token."""
    exact_match: float
    """Expected share of sampled answers that are exactly right, end marker included."""


class Answers(NamedTuple):
    """Right answers to one batch of questions."""

    logprobs: torch.Tensor
    """[B, A]: log probability of every answer token; 0 where an answer is shorter than the longest."""
    num_tokens: int
    """Answer tokens, without that padding."""


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzle: TextPuzzle, target: float, seed: int
) -> Iterator[Progress]:
    """Train `model` in place until its exact match is at least `target`; yields before every step and at the end.

    The same seed gives the same weights. Raises `WarmStartError` after `MAX_STEPS`.
    """
    numbers = random.Random(seed)

    def draw() -> Answers:
        texts = [puzzle.text(numbers.randrange(puzzle.num_texts)) for _ in range(BATCH_SIZE)]
        logprobs = answer_logprobs(model, *tokenize(tokenizer, puzzle, texts))
        return Answers(logprobs, logprobs.numel())

    return climb(model, puzzle.name, draw, target)


def climb(model: PreTrainedModel, name: str, draw: Callable[[], Answers], target: float) -> Iterator[Progress]:
    """The loop of a warm start; `draw` answers a new batch with `model` as it is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(MAX_STEPS + 1):
        logprobs, num_tokens = draw()
        loss = -logprobs.sum() / num_tokens
        progress = Progress(step, loss.item(), expected_exact_match(logprobs))
        yield progress
        if progress.exact_match >= target:
            return
        _descend(model, optimizer, loss)
    raise WarmStartError(f"{name}: exact match did not reach {target} in {MAX_STEPS} supervised steps")


def tokenize(
    tokenizer: PreTrainedTokenizerFast, puzzle: TextPuzzle, texts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [B, P] as the orchestrator renders them, and right answers [B, A]."""
    chats = [[{"role": "user", "content": puzzle.prompt(text)}] for text in texts]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    answers = [tokenizer.encode(puzzle.answer(text) + tokenizer.eos_token) for text in texts]
    return torch.tensor(prompts), torch.tensor(answers)


def answer_logprobs(model: Qwen3ForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Log probability of every answer token [B, A] after its prompt [B, P] and the answer's tokens before it."""
    inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
    logits: torch.Tensor = model(inputs, use_cache=False, logits_to_keep=answers.shape[1]).logits
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


def expected_exact_match(logprobs: torch.Tensor) -> float:
    """Mean probability of sampling the whole answer, from the log probabilities [B, A] of its tokens."""
    return logprobs.detach().sum(1).exp().mean().item()


def _descend(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
