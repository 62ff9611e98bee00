"""The example runs of `configs/`: model, environment and answers fit, and the services' own files say the same."""

from pathlib import Path
from typing import Any

import pytest

from colour_puzzle import COLOUR, COLOURS
from runtime.config.config import load_config, parse_config
from runtime.launch.rl_config import RlConfig, compose, find_services
from text_puzzle import PUZZLES
from tiny_models.cli import main as make_tiny_model

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
RUNS = sorted(path.parent.name for path in CONFIGS.glob("*/rl.toml"))
"""Those that one machine runs; `multi_node` is for several and has tests of its own (tests/deploy)."""
TASKS = {puzzle.name: (puzzle.name, puzzle.length) for puzzle in PUZZLES.values()}
TASKS["name-colour"] = (COLOUR.name, max(map(len, COLOURS)))
"""Environment to the task of its warm start, and the letters of its longest answer."""
SERVICES = {spec.name: spec.config_class for spec in find_services()}


def load_rl(run: str) -> RlConfig:
    return parse_config(compose(find_services()), ["@", str(CONFIGS / run / "rl.toml")], prog="rl")


@pytest.mark.parametrize("service", SERVICES)
def test_service_alone_is_set_as_in_the_file_for_all(service: str) -> None:
    alone = load_config(SERVICES[service], ["@", str(CONFIGS / "copy_text" / f"{service}.toml")], prog=service)
    together = load_rl("copy_text").services[service]
    assert settings(alone.model_dump(mode="json")) == settings(together.model_dump(mode="json"))


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the training: all but addresses and start-up deadlines, which `rl` hands out itself."""
    omitted = {"server", "health", "engines"} | ({"orchestrator"} if "optimizer" in config else set())
    return {key: value for key, value in config.items() if key not in omitted}


@pytest.mark.parametrize("run", RUNS)
def test_prepare_makes_the_model_of_the_run(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_rl(run)
    python, module_flag, module, *arguments = config.prepare
    assert (python, module_flag, module) == ("python", "-m", "tiny_models")
    arguments[arguments.index("--warm-start") + 1] = "0"  # the warm start has its own test, and takes seconds
    monkeypatch.chdir(tmp_path)
    assert make_tiny_model(arguments) == 0
    assert (tmp_path / config.model.path / "tokenizer.json").is_file()


@pytest.mark.parametrize("run", RUNS)
def test_environment_is_the_task_of_the_warm_start_and_its_answers_fit(run: str) -> None:
    services = load_rl(run).services
    (env,) = services["orchestrator"].model_dump()["envs"]
    task, longest = TASKS[env["id"]]
    assert task in load_rl(run).prepare
    assert env["sampling"]["max_tokens"] > longest
    assert services["inference"].model_dump()["torch"]["max_model_len"] >= 32 + env["sampling"]["max_tokens"]
