"""Configs: every file loads, every key is documented and read by somebody, a removed one is refused by its name."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from orchestrator.config.eval import EvalCommandConfig
from runtime.config.config import Config, parse_config
from runtime.config.keys import Key, config_keys
from runtime.config.validation_errors import REMOVED_KEYS
from runtime.errors import UserError
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
MIN_WORDS = 4
"""Of the description of a key: fewer only repeat its name."""


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


def test_every_key_says_more_than_its_name() -> None:
    assert [name for name, (_, key) in KEYS.items() if len((key.field.description or "").split()) < MIN_WORDS] == []


def test_no_key_of_a_shipped_file_is_advanced() -> None:
    hidden = [f"{path.relative_to(ROOT)}: {key}" for path in FILES for key in keys_in(path) & ADVANCED[path.stem]]
    assert hidden == []


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_no_key_of_the_first_pages_is_advanced(page: str) -> None:
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w.-]+)", (ROOT / page).read_text())}
    assert flags & set().union(*ADVANCED.values()) == set()


def keys_in(path: Path) -> set[str]:
    return set(_dotted(tomllib.loads(path.read_text())))


def _dotted(value: object, prefix: str = "") -> Iterator[str]:
    yield prefix
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _dotted(inner, f"{prefix}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _dotted(inner, f"{prefix}[]")


ADVANCED = {
    name: {key.name for key in config_keys(config_class) if key.is_advanced and not key.is_table}
    for name, config_class in CLASSES.items()
}
"""Keys that `--help` leaves out, by the stem of the files that may have them."""


def test_no_removed_key_is_a_key() -> None:
    assert [name for name in KEYS for removed in REMOVED_KEYS if f".{name.split()[1]}".endswith(f".{removed}")] == []


@pytest.mark.parametrize("where", sorted(set(REMOVED_KEYS.values())))
def test_a_removed_key_is_a_constant_with_a_docstring(where: str) -> None:
    name, _, path = where.split()
    assert re.search(rf'^{name} = \d+(\.\d+)?\n""".', (ROOT / path).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("service", "key", "removed"),
    [
        ("rl", "end-timeout-s", "end_timeout_s"),
        ("rl", "inference.vllm.max-restarts", "vllm.max_restarts"),
        ("rl", "metrics.wandb.init-timeout-s", "metrics.wandb.init_timeout_s"),
        ("inference", "torch.max-waiting", "torch.max_waiting"),
        ("inference", "vllm.max-waiting", "vllm.max_waiting"),
        ("inference", "server.request-timeout-s", "server.request_timeout_s"),
        ("orchestrator", "concurrency-period-s", "concurrency_period_s"),
        ("orchestrator", "error-window", "error_window"),
        ("orchestrator", "engines.dns-interval-s", "engines.dns_interval_s"),
        ("eval", "engines.dns-interval-s", "engines.dns_interval_s"),
        ("trainer", "data.fake.sigma", "data.fake.sigma"),
        ("trainer", "data.fake.group-size", "data.fake.group_size"),
    ],
)
def test_a_removed_key_is_refused_with_its_constant(service: str, key: str, removed: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{removed}; it is a constant now ({REMOVED_KEYS[removed]})")):
        parse_config(CLASSES[service], [f"--{key}", "1", "--model.path", "model"], prog=service)


@pytest.mark.parametrize("removed", ["worker_start_timeout_s", "max_worker_restarts"])
def test_a_removed_key_of_an_environment_is_refused_with_its_constant(removed: str) -> None:
    flags = ["--model.path", "model", "--envs", f'[{{"id": "toy", "{removed}": 1}}]']
    constant = REMOVED_KEYS[f"envs[].{removed}"]
    with pytest.raises(UserError, match=re.escape(f"envs[0].{removed}; it is a constant now ({constant})")):
        parse_config(CLASSES["orchestrator"], flags, prog="orchestrator")


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
