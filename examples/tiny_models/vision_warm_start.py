"""Supervised warm start of the tiny vision model: right names for drawn images.

Shapes: B images, P prompt tokens, A answer tokens (padded: names differ in length), N patches of all images.
"""

import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from colour_puzzle import ColourPuzzle
from tiny_models.vision_architecture import MERGE_SIZE, build_image_processor
from tiny_models.warm_start import BATCH_SIZE, Answers, Progress, climb

NUM_IMAGES = 1 << 30
"""Numbers that the warm start draws from: hardly ever one that the environment shows."""


def vision_warm_start(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    puzzle: ColourPuzzle,
    target: float,
    seed: int,
) -> Iterator[Progress]:
    """See `warm_start`."""
    numbers = random.Random(seed)

    def draw() -> Answers:
        return named(model, tokenizer, puzzle, [numbers.randrange(NUM_IMAGES) for _ in range(BATCH_SIZE)])

    return climb(model, puzzle.name, draw, target)


def named(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    puzzle: ColourPuzzle,
    numbers: list[int],
) -> Answers:
    """Log probabilities of the right names of images `numbers`."""
    images = build_image_processor()(images=[puzzle.draw(number) for number in numbers], return_tensors="pt")
    image_id = model.config.image_token_id
    prompts = torch.tensor([prompt(tokenizer, puzzle, image_id, grid) for grid in images["image_grid_thw"].tolist()])
    words = [tokenizer.encode(puzzle.answer(number) + tokenizer.eos_token) for number in numbers]
    longest = max(map(len, words))
    answers = torch.tensor([word + [tokenizer.pad_token_id] * (longest - len(word)) for word in words])
    is_answer = torch.tensor([[1.0] * len(word) + [0.0] * (longest - len(word)) for word in words])
    inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
    logits: torch.Tensor = model(
        inputs,
        mm_token_type_ids=(inputs == image_id).int(),
        use_cache=False,
        logits_to_keep=longest,
        **images,
    ).logits
    logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0] * is_answer
    return Answers(logprobs, int(is_answer.sum()))


def prompt(tokenizer: PreTrainedTokenizerFast, puzzle: ColourPuzzle, image_id: int, grid: list[int]) -> list[int]:
    """The prompt of an image with this grid [3], as the orchestrator renders and expands it."""
    content = [{"type": "image"}, {"type": "text", "text": puzzle.question}]
    chat = [{"role": "user", "content": content}]
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    place = ids.index(image_id)
    num_tokens = grid[1] * grid[2] // MERGE_SIZE**2
    return ids[:place] + [image_id] * num_tokens + ids[place + 1 :]
