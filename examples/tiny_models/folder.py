"""Making a model folder: built beside its place, then renamed, so that it is whole or absent."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from colour_puzzle import COLOUR
from text_puzzle import PUZZLES
from tiny_models.architecture import build_model
from tiny_models.errors import FolderTakenError
from tiny_models.recipe import Recipe
from tiny_models.tokenizer import build_tokenizer
from tiny_models.vision_architecture import build_image_processor, build_vision_model
from tiny_models.vision_warm_start import vision_warm_start
from tiny_models.warm_start import Progress, warm_start


def make_folder(recipe: Recipe, out: Path, report: Callable[[Progress], None]) -> None:
    """Make the Hugging Face folder `out`. Does nothing if it is there already.

    Raises `FolderTakenError` if something else is, and `WarmStartError`; in both cases `out` is left as it was.
    """
    if recipe.made(out):
        return
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _build(recipe, building, report)
        building.chmod(0o755)  # mkdtemp makes it private
        _put_in_place(recipe, building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises `FolderTakenError` unless `out` is absent or an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FolderTakenError(f"{out} exists and was made in another way; remove it or choose another --out")


def _build(recipe: Recipe, folder: Path, report: Callable[[Progress], None]) -> None:
    (_build_vision if recipe.task == COLOUR.name else _build_text)(recipe, folder, report)
    recipe.write(folder)


def _build_text(recipe: Recipe, folder: Path, report: Callable[[Progress], None]) -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.seed, recipe.head_gain)
    if recipe.warm_start > 0:
        for progress in warm_start(model, tokenizer, PUZZLES[recipe.task], recipe.warm_start, recipe.seed):
            report(progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_vision(recipe: Recipe, folder: Path, report: Callable[[Progress], None]) -> None:
    tokenizer = build_tokenizer(vision=True)
    model = build_vision_model(tokenizer, recipe.seed, recipe.head_gain)
    if recipe.warm_start > 0:
        for progress in vision_warm_start(model, tokenizer, COLOUR, recipe.warm_start, recipe.seed):
            report(progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)


def _put_in_place(recipe: Recipe, building: Path, out: Path) -> None:
    try:
        building.rename(out)
    except OSError as error:
        if not recipe.made(out):  # a second maker of the same model may have been quicker: that is fine
            raise FolderTakenError(f"{out} appeared while the model was made: {error.strerror}") from error
