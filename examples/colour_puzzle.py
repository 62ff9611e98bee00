"""`ColourPuzzle`: a drawn image goes in, the name of its colour is the right answer.

Shared by the environments and the tiny vision model that is warm-started on them. Pillow only: neither torch nor
verifiers is imported. An image is decided by its number alone, on every machine and in every run.
"""

import base64
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from PIL import Image, ImageDraw

COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (200, 40, 40),
        "green": (40, 160, 60),
        "blue": (50, 70, 200),
        "yellow": (220, 210, 50),
        "pink": (230, 120, 180),
        "white": (225, 225, 225),
        "orange": (230, 130, 40),
        "cyan": (60, 200, 210),
    }
)
JITTER = 20
"""How far each channel of a colour is from its name's, at most."""


@dataclass(frozen=True, slots=True)
class ColourPuzzle:
    """One family of images: a disc or a square somewhere on a dark ground."""

    name: str
    question: str
    side: int
    """Pixels."""

    def answer(self, number: int) -> str:
        """The name of the colour of image `number`."""
        return _generator(number).choice(list(COLOURS))

    def draw(self, number: int) -> Image.Image:
        """Image `number`."""
        numbers = _generator(number)
        colour = COLOURS[numbers.choice(list(COLOURS))]
        fill = tuple(min(255, max(0, level + numbers.randint(-JITTER, JITTER))) for level in colour)
        ground = tuple(numbers.randint(0, 60) for _ in range(3))
        image = Image.new("RGB", (self.side, self.side), ground)
        size = numbers.randint(self.side // 2, self.side - 2)
        left, top = (numbers.randint(0, self.side - size - 1) for _ in range(2))
        box = (left, top, left + size, top + size)
        draw = ImageDraw.Draw(image)
        (draw.ellipse if numbers.random() < 0.5 else draw.rectangle)(box, fill=fill)
        return image

    def data_url(self, number: int) -> str:
        """Image `number` as chat messages carry it."""
        file = io.BytesIO()
        self.draw(number).save(file, format="PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _generator(number: int) -> random.Random:
    return random.Random(f"colour/{number}")


COLOUR = ColourPuzzle("colour", "colour?", side=16)
