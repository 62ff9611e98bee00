"""From an environment's config to its `VerifiersAdapter`, with the driver that fits it."""

import asyncio
import importlib
import importlib.util
import inspect
import re
from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.engines.protocol import Model
from orchestrator.envs.protocol import RolloutRequest, failure_of
from orchestrator.envs.verifiers.drivers import (
    GROUP_SIZE_FIELD,
    HARNESS_ID,
    SUBPROCESS,
    DirectDriver,
    Driver,
    GatewayDriver,
)
from orchestrator.values.rollout import Example, FailureReason, Rollout, RolloutFailure
from runtime.errors import UserError

MAX_UNBOUNDED_EXAMPLES = 65536
"""Examples taken from a taskset that never ends."""


class VerifiersAdapter:
    """Implements `EnvAdapter` with the tasks of one verifiers environment, which `driver` plays."""

    def __init__(self, name: str, tasks: Sequence[vf.Task], driver: Driver, *, scores_jointly: bool) -> None:
        self.name = name
        self.scores_jointly = scores_jointly
        ids = example_ids([task.data.id for task in tasks])
        self._examples = tuple(Example(name, example_id, task) for example_id, task in zip(ids, tasks, strict=True))
        self.driver = driver

    @property
    def examples(self) -> Sequence[Example]:
        """All tasks of the taskset, in its order."""
        return self._examples

    async def start(self) -> None:
        """Bring up the environment's servers."""
        await self.driver.start()

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        """The rollout, or the whole group; what goes wrong in it is data."""
        try:
            async with asyncio.timeout(request.timeout_s) as deadline:
                return await self.driver.run(request)
        except UserError:  # the config asks for what this environment does not have
            raise
        except Exception as error:  # whatever an environment raises costs this rollout, not the run
            if deadline.expired():
                message = f"{request.group_id}#{request.index} took longer than {request.timeout_s:g} s"
                failed = RolloutFailure(FailureReason.ENV_TIMEOUT, message)
            else:
                failed = failure_of(error)
        return [failed] * (request.group_size if self.scores_jointly else 1)

    async def close(self) -> None:
        """Release the environment's servers. Idempotent."""
        await self.driver.close()


def load(config: EnvConfig, engine: Model, tokenizer: Tokenizer | None) -> VerifiersAdapter:
    """The environment that `config` names. Raises `UserError`."""
    env, scores_jointly = _load_env(config)
    tasks = _load_tasks(config, env)
    if tokenizer is not None and tokenizer.images is None and any(_has_image(task.data) for task in tasks):
        raise UserError(f"env {config.id!r} shows images, and the model in {tokenizer.folder} does not see any")
    obstacle = "its episodes are groups" if scores_jointly else _obstacle_to_direct(config, env, tasks)
    if config.driver == "direct" and obstacle is not None:
        raise UserError(f"env {config.id!r} cannot use driver 'direct': {obstacle}; use 'auto' or 'gateway'")
    driver: Driver
    if obstacle is None and config.driver != "gateway":
        driver = DirectDriver(config, engine, tokenizer)
    else:
        _check_tools(config, env, tasks[0])
        driver = GatewayDriver(env, config, engine, tokenizer, scores_jointly=scores_jointly)
    return VerifiersAdapter(config.label, tasks, driver, scores_jointly=scores_jointly)


def _load_env(config: EnvConfig) -> tuple[vf.Env, bool]:
    module = config.id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    tried = (f"verifiers.v1.tasksets.{module}", module)
    found = None if "." in module else next((name for name in tried if importlib.util.find_spec(name)), None)
    if found is None:
        raise UserError(
            f"env {config.id!r} does not exist: tried to import {tried[0]} and {tried[1]}; is it installed?"
        )
    try:
        importlib.import_module(found)  # verifiers would call a module whose own import fails "not found"
        config_type = vf.env_config_type(config.id)
        scores_jointly = GROUP_SIZE_FIELD in config_type.model_fields
        return vf.load_environment(
            vf.resolve_env_config(_raw_config(config, config_type, scores_jointly))
        ), scores_jointly
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserError(f"env {config.id!r} refuses its args: {problems}") from error
    except Exception as error:  # importing and building foreign code: any error means this config cannot run
        raise UserError(f"env {config.id!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _raw_config(config: EnvConfig, config_type: Any, scores_jointly: bool) -> dict[str, Any]:
    """Every role in a subprocess (verifiers' default is a paid sandbox), with our harness unless it has its own."""
    raw: dict[str, Any] = {"taskset": {**config.args, "id": config.id}}
    brings_harness = vf.default_harness_id(config.id) != "bash"
    for name, field in config_type.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            keep = brings_harness or field.default.harness is not None
            raw[name] = {"runtime": SUBPROCESS} | ({} if keep else {"harness": {"id": HARNESS_ID}})
    if scores_jointly:
        raw |= {GROUP_SIZE_FIELD: config.group_size, "max_concurrent_agents": None}
    return raw


def _load_tasks(config: EnvConfig, env: vf.Env) -> list[vf.Task]:
    try:
        taskset = env.taskset if env.taskset.bounded else env.taskset.take(MAX_UNBOUNDED_EXAMPLES)
        tasks = list(taskset)
    except Exception as error:  # foreign code, as above
        raise UserError(f"env {config.id!r} cannot load its tasks: {type(error).__name__}: {error}") from error
    if not tasks:
        raise UserError(f"env {config.id!r} has no tasks")
    return tasks


def _obstacle_to_direct(config: EnvConfig, env: vf.Env, tasks: list[vf.Task]) -> str | None:
    """Why the environment needs more than one completion and its task's scoring; `None` if it does not."""
    task = tasks[0]
    functions = {name: member for base in type(task).__mro__ for name, member in vars(base).items() if callable(member)}
    scoring = [*task.hooks("metric"), *task.hooks("reward")]
    obstacles = {
        "it has its own Env": type(env) is not vf.SingleAgentEnv,
        "it brings its own harness": vf.default_harness_id(config.id) != "bash",
        "it serves tools": _serves_tools(env, task),
        "its tasks have setup or finalize hooks": type(task).setup is not vf.Task.setup
        or type(task).finalize is not vf.Task.finalize,
        "its tasks stop or intercept model calls": bool(task.hooks("stop"))
        or any(hasattr(function, "intercept") for function in functions.values()),
        "its scoring needs a runtime": any(_needs_runtime(function) for function in scoring),
        "its scoring uses judges": bool(task.config.judges),
        "some tasks have their own timeouts": any(each.data.timeout != vf.TaskTimeout() for each in tasks),
        "some tasks have no prompt": any(each.data.prompt is None for each in tasks),
        "some tasks need an image": any(each.data.image is not None for each in tasks) or task.NEEDS_CONTAINER,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _serves_tools(env: vf.Env, task: vf.Task) -> bool:
    return bool(env.taskset.toolsets(env.taskset.config) or task.toolsets(task.config))


def _check_tools(config: EnvConfig, env: vf.Env, task: vf.Task) -> None:
    if _serves_tools(env, task) and any(h.id == HARNESS_ID for h in env.config.agent_harnesses().values()):
        raise UserError(f"env {config.id!r} serves tools, which the token gateway does not support")


def _has_image(data: vf.TaskData) -> bool:
    """Whether a task opens with an image; later turns show when they come."""
    contents = () if data.prompt is None or isinstance(data.prompt, str) else (each.content for each in data.prompt)
    return any(part.type == "image_url" for content in contents if isinstance(content, list) for part in content)


_SAFE = re.compile(r"[A-Za-z0-9._-]{1,128}")


def example_ids(given: Sequence[str | None]) -> list[str]:
    """The environment's own ids if every example has one, all differ and fit into a group id; else their positions."""
    own = [name for name in given if name is not None and _SAFE.fullmatch(name)]
    if len(own) == len(given) and len(set(own)) == len(own):
        return own
    return [str(position) for position in range(len(given))]
