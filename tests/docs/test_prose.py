"""The prose of the documentation is short: no sentence over 30 words, no row of a table over 40.

What is counted:

- Fenced and indented code is skipped. A code span is one word. Of a link its text counts, not its target.
- A word is what stands between white space and has a letter or a digit.
- A sentence ends at `.`, `!`, `?` or `:`, if white space and then a capital, a digit or a code span follow. It ends
  with its paragraph, heading, list item and table cell too. A semicolon does not end a sentence.
- The cells of a row are counted together.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import PAGES, ROOT

MAX_SENTENCE_WORDS = 30
MAX_ROW_WORDS = 40
EXEMPT = {"configuration.md"}
"""Generated from the docstrings of config keys, a few of which are still longer."""
CHECKED = [page for page in (*PAGES, *ROOT.glob("CONTRIBUTING.md")) if page.name not in EXEMPT]

_FENCE = re.compile(r" *```")
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) +")
_HEADING = re.compile(r"^#+ +")
_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.!?:][)\"'*_]*\s+(?=[(\"'*_]*[A-Z0-9`])")


def _one_word(span: re.Match[str]) -> str:
    return "`" + re.sub(r"[\s.!?:|`]", "_", span[2]) + "`" + "\n" * span[2].count("\n")


class Piece(NamedTuple):
    """A paragraph, a heading, a list item, a row of a table, or a sentence of one."""

    line: int
    text: str

    @property
    def is_row(self) -> bool:
        return self.text.lstrip().startswith("|")

    def plain(self) -> str:
        """Links are their texts, code spans one word; lines stay where they are."""
        return _LINK.sub(r"\1", _SPAN.sub(_one_word, self.text))

    def sentences(self) -> Iterator["Piece"]:
        plain, start = self.plain(), 0
        ends = {match.end() for match in _END.finditer(plain)} | {len(plain)}
        if self.is_row:
            ends |= {at + 1 for at, char in enumerate(plain) if char == "|"}
        for end in sorted(ends):
            yield Piece(self.line + plain.count("\n", 0, start), plain[start:end])
            start = end

    @property
    def num_words(self) -> int:
        return sum(re.search(r"[\w`]", word) is not None for word in self.plain().replace("|", " ").split())

    @property
    def first_words(self) -> str:
        return " ".join(self.text.replace("|", " ").split()[:6])


def pieces(text: str) -> list[Piece]:
    """All of a page that is prose."""
    found: list[Piece] = []
    goes_on = False
    for number, line in enumerate(_without_fences(text), 1):
        is_heading = _HEADING.match(line) is not None
        is_code = line.startswith("    ") and not (goes_on or _ITEM.match(line))
        if not line.strip() or is_code:
            goes_on = False
        elif goes_on and not (is_heading or _ITEM.match(line) or line.startswith("|")):
            found[-1] = Piece(found[-1].line, f"{found[-1].text}\n{line}")
        else:
            found.append(Piece(number, _HEADING.sub("", _ITEM.sub("", line))))
            goes_on = not is_heading
    return found


def _without_fences(text: str) -> Iterator[str]:
    """Every line; those of fenced code are empty."""
    is_code = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_code = not is_code
            yield ""
        else:
            yield "" if is_code else line


def too_long(text: str) -> list[str]:
    """`line: number of words: first words`, of every long sentence and row."""
    rows = [piece for piece in pieces(text) if piece.is_row and piece.num_words > MAX_ROW_WORDS]
    sentences = [found for piece in pieces(text) for found in piece.sentences() if found.num_words > MAX_SENTENCE_WORDS]
    return [f"{piece.line}: {piece.num_words} words: {piece.first_words}" for piece in sorted(rows + sentences)]


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.name)
def test_sentences_and_table_rows_are_short(page: Path) -> None:
    found = too_long(page.read_text())
    assert not found, "\n".join(f"{page.relative_to(ROOT)}:{each}" for each in found)


def words_of(text: str) -> list[int]:
    return [sentence.num_words for piece in pieces(text) for sentence in piece.sentences()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two. Three\nfour five.", [2, 3]),
        ("One two: three; four, 0.5 and docs/x.md, e.g. Five.", [9]),
        ("One `a b. C d` two. `x y` three (four). **Five**!", [3, 3, 1]),
        ("One [two three](a.md#b-c) - four ![five](six.png).", [5]),
        ("# One\nTwo\n- three\n  four\n- five\n\n1. six", [1, 1, 2, 1, 1]),
        ("One:\n\n```sh\ntwo three\n```\n\n    four five\n\nSix", [1, 1]),
    ],
)
def test_words_of_sentences_are_counted(text: str, expected: list[int]) -> None:
    assert words_of(text) == expected


def test_a_long_sentence_is_found_with_its_line() -> None:
    text = "Short.\n\nAlso short. But " + "very " * 15 + "\n" + "very " * 15 + "long."
    assert too_long(text) == ["3: 32 words: But very very very very very"]


def test_cells_of_a_row_are_counted_together() -> None:
    cell = "word " * 14
    assert too_long(f"| a | b |\n|---|---|\n| {cell}| {cell}| {cell}|") == [
        "3: 42 words: word word word word word word"
    ]
    assert not too_long(f"| {cell}| {cell}| x |")
