"""`Recipe`: everything that decides a tiny model's weights, and the file in its folder that remembers it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RECIPE_FILE = "tiny_model.json"
FORMAT = 1
"""Raised when the same recipe gives other weights than before, so that old folders are not taken for new ones."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The same recipe always gives the same weights (on the same machine and torch)."""

    task: str
    """Name of the puzzle whose prompts the model is warm-started on."""
    warm_start: float
    """Sampled exact match at which the supervised warm start ends; 0 keeps the random weights."""
    seed: int
    head_gain: float = 1.0
    """What the last norm multiplies by at the start. A head that stays frozen, as with LoRA, needs more than 1: logits
    cannot exceed it by much, and the model could never become sure of a token."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Leave the recipe in `folder`."""
        (folder / RECIPE_FILE).write_text(json.dumps(self._facts(), indent=2) + "\n")

    def made(self, folder: Path) -> bool:
        """Whether `folder` is the complete result of this recipe."""
        try:
            return bool(json.loads((folder / RECIPE_FILE).read_text()) == self._facts())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return False

    def _facts(self) -> dict[str, object]:
        """All fields; without the gain where it is 1, as in folders from before it could be another."""
        return {key: value for key, value in asdict(self).items() if (key, value) != ("head_gain", 1.0)}
