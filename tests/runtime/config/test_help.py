"""Help and reference are made from the config classes, so they cannot be wrong."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from runtime.config.config import Config, parse_config
from runtime.config.help import config_help, config_reference, default_text, type_name
from runtime.config.keys import config_keys
from runtime.launch.rl_config import RlConfig


class Inner(Config):
    """Inside."""

    kind: Literal["a", "b"] = "a"
    """Which | kind."""
    a_key_with_a_name_that_is_longer_than_the_column: float = 0.5
    """A number."""


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
