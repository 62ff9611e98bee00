import pytest

from text_puzzle import COPY, PUZZLES, REVERSE, TextPuzzle


def test_right_answers() -> None:
    assert REVERSE.answer("abcd") == "dcba"
    assert COPY.answer("abcde") == "abcde"
    assert (REVERSE.prompt("abcd"), COPY.prompt("ab")) == ("reverse: abcd", "copy: ab")


def test_puzzles_are_found_by_the_id_of_their_environment() -> None:
    assert dict(PUZZLES) == {"reverse-text": REVERSE, "copy-text": COPY}


@pytest.mark.parametrize("puzzle", PUZZLES.values(), ids=PUZZLES.keys())
def test_numbers_name_every_text_once(puzzle: TextPuzzle) -> None:
    texts = {puzzle.text(number) for number in range(puzzle.num_texts)}
    assert len(texts) == puzzle.num_texts
    assert all(len(text) == puzzle.length and set(text) <= set(puzzle.alphabet) for text in texts)


def test_sample_is_distinct_and_decided_by_its_seed() -> None:
    texts = REVERSE.sample(1000, seed=3)
    assert len(set(texts)) == 1000
    assert texts == REVERSE.sample(1000, seed=3)
    assert texts != REVERSE.sample(1000, seed=4)


def test_sample_larger_than_the_puzzle_is_refused() -> None:
    assert len(set(REVERSE.sample(REVERSE.num_texts, seed=0))) == 6**4
    with pytest.raises(ValueError, match="only 1296 different texts exist, 1297 were asked for"):
        REVERSE.sample(REVERSE.num_texts + 1, seed=0)


def test_resizing_keeps_what_is_not_given() -> None:
    assert COPY.resized("xy", None) == TextPuzzle("copy-text", "copy", "xy", 5, COPY.transform)
    assert COPY.resized(None, 3).num_texts == 8**3


@pytest.mark.parametrize(("alphabet", "length"), [("aab", 3), ("", 3), ("ab", 0)])
def test_impossible_puzzles_cannot_be_built(alphabet: str, length: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        TextPuzzle("odd", "do", alphabet, length, str.upper)
