"""`python -m tiny_models`: make a tiny model folder."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from colour_puzzle import COLOUR
from text_puzzle import PUZZLES
from tiny_models.errors import TinyModelError
from tiny_models.recipe import Recipe

if TYPE_CHECKING:
    from tiny_models.warm_start import Progress

PRINT_EVERY_STEPS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 made or there already, 1 the warm start failed or the folder is taken."""
    arguments = _parser().parse_args(argv)
    recipe = Recipe(arguments.task, arguments.warm_start, arguments.seed, arguments.head_gain)
    if recipe.made(arguments.out):  # before torch is imported: a second call costs nothing
        print(f"{arguments.out}: already made")
        return 0
    try:
        _make(recipe, arguments.out)
    except TinyModelError as error:
        print(f"tiny_models: {error}", file=sys.stderr)
        return 1
    return 0


def _make(recipe: Recipe, out: Path) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tiny_models.folder import make_folder

    torch.set_num_threads(1)  # more threads slow a model of this size down
    disable_progress_bar()
    started = time.monotonic()
    make_folder(recipe, out, partial(_print_progress, recipe.warm_start))
    print(f"{out}: made in {time.monotonic() - started:.1f} s")


def _print_progress(target: float, progress: "Progress") -> None:
    if progress.step % PRINT_EVERY_STEPS == 0 or progress.exact_match >= target:
        print(
            f"warm start: step {progress.step:4d}  loss {progress.loss:.3f}  exact match {progress.exact_match:.3f}",
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tiny_models", description="Make a tiny Qwen3, or Qwen3-VL for images, with a character tokenizer."
    )
    parser.add_argument(
        "--task", choices=sorted([*PUZZLES, COLOUR.name]), required=True, help="puzzle that the warm start teaches"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make; left alone if it is complete")
    parser.add_argument("--warm-start", type=_share, default=0.0, help="stop at this sampled exact match; 0: random")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights")
    parser.add_argument("--head-gain", type=float, default=1.0, help="weight of the last norm at first; LoRA wants 8")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value
