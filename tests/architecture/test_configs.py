"""Configs: every file loads, every key is documented and read by somebody."""

import ast
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from orchestrator.config.eval import EvalCommandConfig
from runtime.config.config import Config, parse_config
from runtime.config.keys import Key, config_keys
from runtime.launch.rl_config import SHARED_KEYS, RlConfig, compose, find_services
from tests.architecture.sources import PACKAGES, ROOT, nodes

FILES = sorted((ROOT / "configs").rglob("*.toml"))
CLASSES: dict[str, type[Config]] = {
    **{spec.name: spec.config_class for spec in find_services()},
    "rl": compose(find_services()),
    "eval": EvalCommandConfig,
}
KEYS = {
    f"{name}: {key.name}": (name, key)
    for name, config_class in CLASSES.items()
    for key in config_keys(RlConfig if name == "rl" else config_class)
}
UNITLESS = ("timeout", "interval", "delay", "duration", "size_mb", "_secs")
"""Ends of a name that lack a unit, or have one of their own."""


def test_there_are_configs() -> None:
    assert {path.stem for path in FILES} >= {"rl", "inference", "orchestrator", "trainer"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_config_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config_class = CLASSES[path.stem]
    assert parse_config(config_class, ["@", str(path)], prog=path.stem) is not None


def test_every_key_is_documented() -> None:
    assert len(KEYS) > 300
    assert [name for name, (_, key) in KEYS.items() if not key.field.description] == []


def test_every_duration_and_size_says_its_unit() -> None:
    assert [name for name in KEYS if name.endswith(UNITLESS)] == []


def test_every_key_is_read() -> None:
    assert [name for name, (service, key) in KEYS.items() if not is_read(service, key)] == []


def is_read(service: str, key: Key) -> bool:
    """By the service or by the runtime; what has one value only needs no reader."""
    package = "orchestrator" if service == "eval" else service
    readers = READ["runtime"] | READ.get(package, set()) | set(SHARED_KEYS)
    has_one_value = get_origin(key.field.annotation) is Literal and len(get_args(key.field.annotation)) == 1
    return key.name.rsplit(".", 1)[-1] in readers or has_one_value


def attributes_read() -> dict[str, set[str]]:
    """Names of attributes that each package reads. Built-in losses take the keys of their config as keywords."""
    read: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for path, node in nodes():
        if isinstance(node, ast.Attribute):
            read[path.parts[0]].add(node.attr)
        elif isinstance(node, ast.FunctionDef) and path.parts[:2] == ("trainer", "losses"):
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            read["trainer"].update(used & {keyword.arg for keyword in node.args.kwonlyargs})
    return read


READ = attributes_read()
