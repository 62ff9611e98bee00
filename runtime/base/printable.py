"""`printable`: text that a terminal shows and never obeys."""

import unicodedata

_OBEYED = {"Cc", "Cf", "Cs", "Co"}


def printable(text: str) -> str:
    """`text` with escapes for what moves cursors, renames windows or turns the direction of writing.

    Newlines and tabs stay. What models and environments wrote reaches logs and screens through this.
    """
    return text if text.isprintable() else "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    is_obeyed = unicodedata.category(character) in _OBEYED and character not in "\n\t"
    return f"\\x{ord(character):02x}" if is_obeyed else character
