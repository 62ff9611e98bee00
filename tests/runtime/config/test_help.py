"""Help and reference are made from the config classes, so they cannot be wrong."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from runtime.config.config import Config, parse_config
from runtime.config.help import config_help, config_reference, default_text, type_name
from runtime.config.keys import Advanced, config_keys
from runtime.errors import UserError
from runtime.launch.rl_config import RlConfig


class Inner(Config):
    """Inside."""

    kind: Literal["a", "b"] = "a"
    """Which | kind."""
    a_key_with_a_name_that_is_longer_than_the_column: float = 0.5
    """A number."""


class Other(Config):
    """Inside, of another type."""

    type: Literal["other"] = "other"
    """`other`: one."""
    shared: int = 1
    """The same."""
    size: int = 1
    """Of one."""


class Another(Config):
    """Inside, of yet another type."""

    type: Literal["another"] = "another"
    """`another`: two."""
    shared: int = 1
    """The same."""
    size: int = 2
    """Of two."""


class Deep(Config):
    """Rare settings beside usual ones."""

    usual: int = 1
    """Often set."""
    rare: Advanced[Literal["a", "b"]] = "a"
    """Hardly ever set."""
    rare_table: Advanced[Inner | None] = None
    """A whole table that is hardly ever set."""
    chosen: Other | Another = Other()
    """One of two tables."""


class Outer(Config):
    """Outside."""

    inner: Inner = Inner()
    """What is inside."""
    items: tuple[Inner, ...] = ()
    """Several."""
    path: Path
    """Where."""
    steps: int | None = Field(None, gt=0)
    """How many."""
    flag: bool = False
    """A switch."""
    names: tuple[str, ...] = ("x", "y")
    """Names."""


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, "int"),
        (Path, "path"),
        (int | None, "int or none"),
        (tuple[str, ...], "list of str"),
        (list[int], "list of int"),
        (Literal["a", "b"], '"a" | "b"'),
        (dict[str, int], "table"),
    ],
)
def test_types_for_people(annotation: object, expected: str) -> None:
    assert type_name(annotation) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("path", "required"),
        ("steps", "none"),
        ("flag", "false"),
        ("names", '["x", "y"]'),
        ("inner.kind", '"a"'),
        ("inner", ""),
        ("inner.a_key_with_a_name_that_is_longer_than_the_column", "0.5"),
    ],
)
def test_defaults_as_in_toml(key: str, expected: str) -> None:
    found = next(known for known in config_keys(Outer) if known.name == key)
    assert default_text(found) == expected


def test_reference_has_a_row_for_each_key_and_a_heading_for_each_table() -> None:
    text = config_reference(Outer)
    assert "| `path` | path | `required` | Where. |" in text
    assert "### `[inner]`\n\nWhat is inside.\n" in text
    assert "### `[items[]]`\n\nSeveral.\n" in text
    assert '| `inner.kind` | "a" \\| "b" | `"a"` | Which \\| kind. |' in text


def test_reference_of_rl_names_every_key() -> None:
    text = config_reference(RlConfig)
    for key in config_keys(RlConfig):
        assert key.is_table or f"| `{key.name}` |" in text


def test_help_fits_its_width_and_names_every_flag() -> None:
    text = config_help(Outer, "outer", width=80)
    assert text.startswith("usage: outer [@ file.toml] [--key value ...]\n\nOutside.\n")
    assert max(len(line) for line in text.splitlines() if not line.startswith("Later")) <= 80
    for key in config_keys(Outer):
        assert key.is_table or f"--{key.name.replace('_', '-')}" in text


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_even_if_the_rest_is_wrong(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(Outer, ["--nonsense", "3", flag], prog="outer")
    assert ended.value.code == 0
    assert "--inner.kind" in capsys.readouterr().out


ADVANCED = ("--rare ", "--rare-table.kind ", "--rare-table.a-key-with-a-name-that-is-longer-than-the-column")


def test_help_leaves_out_advanced_keys_and_says_how_many() -> None:
    text = config_help(Deep, "deep", width=80)
    assert "Advanced keys are hidden here: 3. `deep --help-all` shows them, too." in text
    assert "--usual " in text
    assert [flag for flag in ADVANCED if flag in text] == []
    assert "rare_table" not in text, "a heading of a table without keys"


def test_help_all_has_them() -> None:
    text = config_help(Deep, "deep", width=80, with_advanced=True)
    assert [flag for flag in ADVANCED if flag not in text] == []
    assert "hidden" not in text


def test_help_of_a_config_without_advanced_keys_does_not_speak_of_them() -> None:
    assert "dvanced" not in config_help(Outer, "outer", width=80)


def test_reference_marks_advanced_keys() -> None:
    text = config_reference(Deep)
    assert '| `rare` | "a" \\| "b" | `"a"` | *Advanced.* Hardly ever set. |' in text
    assert "| `usual` | int | `1` | Often set. |" in text
    assert text.count("*Advanced.*") == len(ADVANCED)


def test_keys_of_several_types_are_one_entry_if_they_are_alike() -> None:
    text = config_reference(Deep)
    assert '| `chosen.type` | "other" \\| "another" | `"other"` | `other`: one. `another`: two. |' in text
    assert text.count("`chosen.shared`") == 1
    assert "| `chosen.size` | int | `1` | Of one. |" in text
    assert "| `chosen.size` | int | `2` | Of two. |" in text


def test_advanced_keys_are_set_and_checked_as_others() -> None:
    assert parse_config(Deep, ["--rare", "b", "--rare-table.kind", "b"], prog="deep").rare == "b"
    with pytest.raises(UserError, match="rare: Input should be 'a' or 'b'"):
        parse_config(Deep, ["--rare", "c"], prog="deep")


@pytest.mark.parametrize(("flags", "is_shown"), [(["--help"], False), (["--help-all"], True), (["-h"], False)])
def test_flag_decides_whether_advanced_keys_are_shown(
    flags: list[str], is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(Deep, flags, prog="deep")
    assert ended.value.code == 0
    assert ("--rare " in capsys.readouterr().out) == is_shown


class House(Config):
    """A table with a default of its own."""

    table: Deep = Deep(usual=7, chosen=Another())
    """It differs in one key, and in which of two tables it has."""
    plain: Deep = Deep()
    """As the class says."""
    absent: Deep | None = None
    """Off unless the table is there."""


def test_default_of_a_key_is_that_of_its_table() -> None:
    keys = [(key.name, default_text(key)) for key in config_keys(House)]
    assert [value for name, value in keys if name.endswith(".usual")] == ["7", "1", "1"]
    assert ("table.rare", '"a"') in keys
    assert ("table.rare_table.kind", '"a"') in keys
    assert ("table.chosen.size", "2") in keys
