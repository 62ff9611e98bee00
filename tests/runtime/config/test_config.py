"""From a command line to a config, and every mistake as one line that names the key.

Help and reference are made from the config classes, so they cannot be wrong.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from runtime.config.config import Config, RunConfig, ServiceConfig, load_config, parse_config, resolved_json
from runtime.config.help import config_help, config_reference, default_text, type_name
from runtime.config.keys import Advanced, config_keys, get_value, key_of, merge, set_value
from runtime.config.validation_errors import nearest_key
from runtime.errors import UserError
from runtime.launch.rl_config import RlConfig


class Optimizer(Config):
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay."""


class Model(Config):
    path: Path
    """Folder."""
    seq_len: int = 1024
    """Tokens."""


class Clip(Config):
    type: Literal["clip"] = "clip"
    """Tag."""
    low: float = 0.2
    """Bound."""


class Plain(Config):
    type: Literal["plain"] = "plain"
    """Tag."""
    scale: float = 1.0
    """Factor."""


class Env(Config):
    id: str
    """Id."""
    group_size: int = 8
    """Size."""


class Example(ServiceConfig):
    """An example."""

    model: Model
    """Model."""
    optimizer: Optimizer = Optimizer()
    """Optimizer."""
    loss: Annotated[Clip | Plain, Field(discriminator="type")] = Clip()
    """Loss."""
    envs: tuple[Env, ...] = ()
    """Envs."""
    pools: tuple[Env, ...] = Field((Env(id="x"),), min_length=1)
    """More envs."""
    urls: tuple[str, ...] = ()
    """URLs."""
    max_steps: int | None = None
    """Steps."""

    @property
    def doubled(self) -> int:
        return 2 * (self.max_steps or 0)


GOOD = ["--model.path", "m"]


def load(*argv: str) -> Example:
    return load_config(Example, argv, prog="example")


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_win_over_later_and_earlier_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('max_steps = 1\n[model]\npath = "m"\nseq_len = 5\n')
    second.write_text("max_steps = 2\n")
    config = load("@", str(first), "@", str(second), "--model.seq-len", "7")
    assert (config.max_steps, config.model.seq_len, config.model.path) == (2, 7, Path("m"))


def test_path_is_relative_to_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\npath = "models/tiny"\n')
    assert load("@", str(tmp_path / "a.toml")).model.path == Path("models/tiny")


@pytest.mark.parametrize("value", ["http://a,http://b", '["http://a", "http://b"]', "http://a, http://b"])
def test_sequences_can_be_given_on_the_command_line(value: str) -> None:
    assert load(*GOOD, "--urls", value).urls == ("http://a", "http://b")


def test_sequence_of_tables_can_be_given_as_json() -> None:
    assert load(*GOOD, "--envs", '[{"id": "x", "group_size": 3}]').envs == (Env(id="x", group_size=3),)


def test_snake_case_flags_work_too() -> None:
    assert load(*GOOD, "--max_steps", "3").doubled == 6


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("run.nme", "run.name"),
        ("run.d", "run.dir"),
        ("lr", "optimizer.lr"),
        ("seqlen", "model.seq_len"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("max_step", "max_steps"),
        ("loss.lo", "loss.low"),
    ],
)
def test_unknown_key_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    assert error_of(*GOOD, f"--{wrong}", "1") == f"unknown key {wrong}; did you mean {nearest}?"


def test_key_unlike_any_other_still_gets_a_suggestion() -> None:
    assert "unknown key q; did you mean " in error_of(*GOOD, "--q", "1")


def test_several_wrong_keys_are_all_named() -> None:
    message = error_of(*GOOD, "--lr", "1", "--run.nme", "x", "--max-steps", "many")
    assert "unknown key lr" in message
    assert "unknown key run.nme" in message
    assert "max_steps: Input should be a valid integer" in message


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "model.path is required"),
        ([*GOOD, "--max-steps", "x"], "max_steps: .*integer.*got 'x'"),
        ([*GOOD, "--optimizer.lr", "-1"], "optimizer.lr: .*greater than 0.*got '-1'"),
        ([*GOOD, "--max-steps"], "--max-steps requires a value"),
        ([*GOOD, "--optimizer", "3"], "--optimizer is a config group"),
        ([*GOOD, "stray"], "stray; a key is set as --key value, a file given as @ FILE$"),
        ([*GOOD, "--envs.0.id", "x"], r"^envs is a list: in a file \[\[envs\]\] begins an entry, a flag .* as JSON$"),
        ([*GOOD, "--urls.0", "x"], r"^urls is a list: in a file urls = \[\.\.\.\] gives it, a flag .* as JSON$"),
        (["x.toml"], "x.toml is not a command of `example`; a config file is given as `example @ FILE`"),
        ([*GOOD, "--optimizer.lr", "inf"], "optimizer.lr: .*finite.*got 'inf'"),
        ([*GOOD, "--loss.scale", "2"], "^loss.scale does not go with loss.type = 'clip'$"),
        ([*GOOD, "--pools", '[{"idd": "a"}]'], r"^pools\[0\].id is required; unknown key pools\[0\].idd; did .*\?$"),
        ([*GOOD, "--pools", "[]"], "^pools: .*at least 1 item"),
        ([*GOOD, "--loss.type", "huber"], "loss: .*'huber'.*'clip'"),
        ([*GOOD, "--envs", '[{"id": 1'], "envs is not valid JSON"),
        ([*GOOD, "--run.name", "../up"], "run.name: .*got '../up'"),
        ([*GOOD, "--log.level", "LOUD"], "log.level: .*'INFO'.*got 'LOUD'"),
        ([*GOOD, "@", "no/such.toml"], "Config file not found: no/such.toml"),
        ([*GOOD, "@", "/"], "cannot read the config|Unsupported file type"),
        ([*GOOD, "@"], "@ must be followed"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(argv: list[str], expected: str) -> None:
    assert re.search(expected, error_of(*argv))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model = 3", "model: expected a table, got 3"),
        ("log = []", "log: expected a table, got []"),
        ('model.path = "m"\nenvs = [{id = "a"}, {idd = "b"}]', "unknown key envs[1].idd; did you mean envs[].id?"),
        ('model.path = "m"\n[loss]\ntype = "clip"\nlw = 3', "unknown key loss.lw; did you mean loss.low?"),
        ("model.path =", "Invalid TOML"),
        ('model.path = "\xff"', "cannot read the config: 'utf-8' codec"),
    ],
)
def test_mistakes_in_a_file_name_the_key(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    assert expected in error_of("@", str(path))


def test_a_file_that_holds_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    assert "a file must hold a table of keys" in error_of("@", str(tmp_path / "list.json"))


def test_long_values_are_cut(tmp_path: Path) -> None:
    assert len(error_of(*GOOD, "--max-steps", "9" * 3 + "x" * 5000)) < 300


def test_dry_run_prints_a_config_that_loads_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(*GOOD, "--max-steps", "3", "--dry-run")
    assert ended.value.code == 0
    (tmp_path / "resolved.json").write_text(capsys.readouterr().out)
    assert load("@", str(tmp_path / "resolved.json")) == load(*GOOD, "--max-steps", "3")


def test_resolved_config_shows_defaults() -> None:
    resolved = json.loads(resolved_json(load(*GOOD)))
    assert resolved["stall_timeout_s"] == 900.0
    assert resolved["model"] == {"path": "m", "seq_len": 1024}


def test_values_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(*GOOD).max_steps = 3


def test_plain_configs_parse_as_well() -> None:
    assert parse_config(Model, ["--path", "p"], prog="x").path == Path("p")


def test_keys_are_listed_with_their_tables() -> None:
    names = [key.name for key in config_keys(Example)]
    assert {"run", "run.name", "loss.low", "loss.scale", "envs[].group_size", "urls"} <= set(names)
    assert names.index("run") < names.index("run.name")
    assert {key.name for key in config_keys(Example) if key.is_table} >= {"run", "loss", "envs"}


@pytest.mark.parametrize(
    ("location", "key"),
    [
        (("envs", 0, "id"), "envs[0].id"),
        (("loss", "clip", "low"), "loss.low"),
        (("loss", "clip", "unknown"), "loss.unknown"),
        (("model",), "model"),
        ((), ""),
    ],
)
def test_locations_become_keys(location: tuple[int | str, ...], key: str) -> None:
    assert key_of(location, Example) == key


def test_nearest_key_prefers_the_whole_name() -> None:
    assert nearest_key("trainer.sed", ["seed", "trainer.seed", "orchestrator.seed"]) == "trainer.seed"


class Door(Config):
    """Has a default of its own."""

    port: int = 0
    """Port."""
    host: str = "a"
    """Host."""


class House(Config):
    """Sets another default for its door."""

    door: Door = Door(port=80)
    """The door."""


def test_table_that_is_given_in_part_keeps_the_default_of_its_field() -> None:
    assert parse_config(House, ["--door.host", "b"], prog="house").door == Door(port=80, host="b")
    assert parse_config(House, ["--door.port", "1"], prog="house").door == Door(port=1)


class ValueInner(Config):
    run: RunConfig = RunConfig(name="inner")
    """Run."""


class ValueOuter(Config):
    inner: ValueInner = ValueInner()
    """Inner."""
    needed: int
    """Needed."""


def test_tree_values_fall_back_to_defaults() -> None:
    assert get_value({"inner": {"run": {"name": "x"}}}, ValueOuter, "inner.run.name") == "x"
    assert get_value({"inner": {"run": {}}}, ValueOuter, "inner.run.name") == "default"
    assert get_value({"inner": {}}, ValueOuter, "inner.run.name") == "inner"
    assert get_value({}, ValueOuter, "inner.run.name") == "inner"
    assert get_value({}, None, "inner.run.name") is None
    assert get_value({}, ValueOuter, "needed") is None
    assert get_value({"inner": 3}, ValueOuter, "inner.run") is None


def test_tree_functions_do_not_change_their_arguments() -> None:
    data: dict[str, object] = {"a": {"b": 1}, "x": 3}
    assert merge(data, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}, "x": 3}
    assert set_value(data, "a.d.e", 5) == {"a": {"b": 1, "d": {"e": 5}}, "x": 3}
    assert set_value(data, "x.y", 5) == data
    assert data == {"a": {"b": 1}, "x": 3}


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
    assert "| `path` | `path` | `required` | Where. |" in text
    assert "### `[inner]`\n\nWhat is inside.\n" in text
    assert "### `[items[]]`\n\nSeveral.\n" in text
    assert '| `inner.kind` | `"a" \\| "b"` | `"a"` | Which \\| kind. |' in text


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
    assert '| `rare` | `"a" \\| "b"` | `"a"` | *Advanced.* Hardly ever set. |' in text
    assert "| `usual` | `int` | `1` | Often set. |" in text
    assert text.count("*Advanced.*") == len(ADVANCED)


def test_keys_of_several_types_are_one_entry_if_they_are_alike() -> None:
    text = config_reference(Deep)
    assert '| `chosen.type` | `"other"` | `"other"` | `other`: one. |' in text
    assert '| `chosen.type` | `"another"` | `"other"` | `another`: two. |' in text
    assert text.count("`chosen.shared`") == 1
    assert "| `chosen.size` | `int` | `1` | Of one. |" in text
    assert "| `chosen.size` | `int` | `2` | Of two. |" in text


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


class OwnDefaults(Config):
    """A table with a default of its own."""

    table: Deep = Deep(usual=7, chosen=Another())
    """It differs in one key, and in which of two tables it has."""
    plain: Deep = Deep()
    """As the class says."""
    absent: Deep | None = None
    """Off unless the table is there."""


def test_default_of_a_key_is_that_of_its_table() -> None:
    keys = [(key.name, default_text(key)) for key in config_keys(OwnDefaults)]
    assert [value for name, value in keys if name.endswith(".usual")] == ["7", "1", "1"]
    assert ("table.rare", '"a"') in keys
    assert ("table.rare_table.kind", '"a"') in keys
    assert ("table.chosen.size", "2") in keys
