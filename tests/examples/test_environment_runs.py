"""The environments as the orchestrator runs them, with a scripted engine in the model's place.

The example runs of `configs/`: model, environment and answers fit, and the services' own files say the same.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat.tokenizer import Tokenizer
from colour_puzzle import COLOUR, COLOURS
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest, accept
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.config.config import load_config, parse_config
from runtime.launch.rl_config import RlConfig, compose, find_services
from text_puzzle import PUZZLES
from tiny_models.cli import main as make_tiny_model
from transport.wire.generation import GenerateRequest

Reply = Callable[[str, int], str]
"""Rendered prompt and seed of a request to the model's reply."""


@pytest.fixture(scope="module")
def model(random_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(random_folder)


@asynccontextmanager
async def running(model: Tokenizer, reply: Reply, **config: Any) -> AsyncIterator[EnvAdapter]:
    eos_id = next(iter(model.eos_ids))

    def script(request: GenerateRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
        prompt = model.decode(request.token_ids.numpy(), skip_special_tokens=False)
        return np.append(model.encode(reply(prompt, request.seed or 0)), np.int32(eos_id))

    env = load_env(EnvConfig(**config), ScriptedEngine(model.vocab_size, eos_id, script=script), model)
    await env.start()
    try:
        yield env
    finally:
        await env.close()


def request(env: EnvAdapter, *, example: int = 0, index: int = 0, group_size: int = 4, timeout_s: float = 60.0) -> Any:
    chosen = env.examples[example]
    return RolloutRequest(
        example=chosen,
        group_id=f"{env.name}/{chosen.example_id}/0",
        index=index,
        group_size=group_size,
        seed=100 + index,
        temperature=1.0,
        max_tokens=16,
        timeout_s=timeout_s,
    )


def asked(prompt: str) -> str:
    """The word that the first user message asks about."""
    return prompt.split(": ", 1)[1].split("<|im_end|>", 1)[0]


def rollouts(results: Any) -> list[Rollout]:
    assert all(isinstance(result, Rollout) for result in results), results
    return list(results)


@pytest.mark.parametrize(
    ("env_id", "answer"), [("reverse-text", lambda word: word[::-1]), ("copy-text", lambda word: word)]
)
async def test_one_turn_environments_run_in_process(
    env_id: str, answer: Callable[[str], str], model: Tokenizer
) -> None:
    async with running(model, lambda prompt, seed: answer(asked(prompt)), id=env_id, driver="direct") as env:
        assert not env.scores_jointly
        (right,) = rollouts(await env.run(request(env)))
    async with running(model, lambda prompt, seed: "?", id=env_id, driver="direct") as env:
        (wrong,) = rollouts(await env.run(request(env)))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.example_id == asked(str(right.messages[0]["content"]) + "<|im_end|>")


async def test_echo_twice_is_one_conversation_of_two_turns(model: Tokenizer) -> None:
    async with running(model, lambda prompt, seed: asked(prompt), id="echo-twice") as env:
        (rollout,) = rollouts(await env.run(request(env)))
    assert rollout.reward == 1.0
    (branch,) = rollout.branches
    word = rollout.example_id
    assert model.decode(branch.token_ids, skip_special_tokens=False) == (
        f"<|im_start|>user\ncopy: {word}<|im_end|>\n<|im_start|>assistant\n{word}<|im_end|>\n"
        f"<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n{word}<|im_end|>"
    )
    assert model.decode(branch.token_ids[branch.sampled], skip_special_tokens=False) == f"{word}<|im_end|>" * 2


@pytest.mark.parametrize(("second", "reward"), [("wrong", 0.5), ("", 0.5)])
async def test_echo_twice_pays_for_each_right_turn(second: str, reward: float, model: Tokenizer) -> None:
    def forgets(prompt: str, seed: int) -> str:
        return second if "again" in prompt else asked(prompt)

    async with running(model, forgets, id="echo-twice") as env:
        (rollout,) = rollouts(await env.run(request(env)))
    assert rollout.reward == reward


async def test_group_race_scores_as_many_siblings_as_the_orchestrator_asks_for(model: Tokenizer) -> None:
    def runner(prompt: str, seed: int) -> str:
        return asked(prompt)[: seed % 7]

    async with running(model, runner, id="group-race", group_size=6) as env:
        assert env.scores_jointly
        group = rollouts(await env.run(request(env, group_size=6)))
    lengths = [rollout.num_sampled_tokens for rollout in group]
    assert len(set(lengths)) > 1, "siblings must be sampled with different seeds"
    expected = {length: sum((length > other) + (length == other) / 2 for other in lengths) - 0.5 for length in lengths}
    assert [rollout.reward * 5 for rollout in group] == pytest.approx([expected[length] for length in lengths])
    assert all(rollout.metrics["exact_match"] == (rollout.num_sampled_tokens == 6) for rollout in group)


async def test_flaky_rollouts_fail_alike_in_two_runs(model: Tokenizer) -> None:
    async def fates() -> list[str]:
        faults = {"raise_rate": 0.3, "nan_rate": 0.3}
        async with running(model, lambda prompt, seed: f"reply {seed}", id="flaky-text", args={"task": faults}) as env:
            results = [accept(await env.run(request(env, index=index)), 1, version=0)[0] for index in range(30)]
        return [result.reason.value if isinstance(result, RolloutFailure) else str(result.reward) for result in results]

    first = await fates()
    assert first == await fates()
    assert set(Counter(first)) == {FailureReason.ENV_ERROR, FailureReason.INVALID_REWARD, "0.0"}


async def test_hanging_rollout_is_cut_at_its_deadline(model: Tokenizer) -> None:
    faults = {"raise_rate": 0.0, "hang_rate": 1.0}
    async with running(model, lambda prompt, seed: "", id="flaky-text", args={"task": faults}) as env:
        (result,) = await env.run(request(env, timeout_s=0.05))
    assert isinstance(result, RolloutFailure)
    assert result.reason is FailureReason.ENV_TIMEOUT


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
