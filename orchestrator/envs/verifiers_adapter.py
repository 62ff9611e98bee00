"""verifiers 0.4.0 environments behind `EnvAdapter`. The only module that imports verifiers; import it late.

Two drivers, with the same result:

- `direct`: a plain single-turn task is one request to the engine and one call of the task's own scoring, in this
  process, in well under a millisecond.
- `gateway`: the environment runs as it would under verifiers, with its own agents, turns and joint scoring. Its model
  is our `Gateway`, which finds the rollout by the trace id that verifiers sends along, and keeps the exact tokens.
"""

import asyncio
import importlib
import importlib.util
import inspect
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import aiohttp
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.state import state_cls

from orchestrator.config import EnvConfig
from orchestrator.engines.chat_model import Model
from orchestrator.envs.examples import example_ids
from orchestrator.envs.outcome import failure_of, scored
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.gateway.server import Gateway
from orchestrator.gateway.session import AnySession, Completion, SamplingPlan, open_session
from orchestrator.rollout import Example, Failure, FailureReason, Rollout
from orchestrator.seeds import stable_hash
from orchestrator.state_columns import read_columns
from orchestrator.tokenizer import Tokenizer
from runtime.errors import UserError

HARNESS_ID = "tandem_harness"
GROUP_SIZE_FIELD = "group_size"
"""An `Env` whose config has this field runs a whole group as one episode and scores it jointly."""
MAX_UNBOUNDED_EXAMPLES = 65536
"""Examples taken from a taskset that never ends."""
SUBPROCESS = {"type": "subprocess"}


class _Driver(Protocol):
    async def start(self) -> None: ...

    async def run(self, request: RolloutRequest) -> list[Rollout | Failure]: ...

    async def close(self) -> None: ...


class VerifiersAdapter:
    """One environment. Implements `EnvAdapter`."""

    def __init__(self, name: str, tasks: Sequence[vf.Task], driver: _Driver, *, scores_jointly: bool) -> None:
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

    async def run(self, request: RolloutRequest) -> Sequence[Rollout | Failure]:
        """The rollout, or the whole group; what goes wrong in it is data."""
        try:
            async with asyncio.timeout(request.timeout_s) as deadline:
                return await self.driver.run(request)
        except UserError:  # the config asks for what this environment does not have
            raise
        except Exception as error:  # whatever an environment raises costs this rollout, not the run
            if deadline.expired():
                message = f"{request.group_id}#{request.index} took longer than {request.timeout_s:g} s"
                failed = Failure(FailureReason.ENV_TIMEOUT, message)
            else:
                failed = failure_of(error)
        return [failed] * (request.group_size if self.scores_jointly else 1)

    async def close(self) -> None:
        """Release the environment's servers. Idempotent."""
        await self.driver.close()


class DirectDriver:
    """One prompt, one completion, the task's own scoring."""

    def __init__(self, config: EnvConfig, engine: Model, tokenizer: Tokenizer | None) -> None:
        model, self._columns = config.label, config.state_columns
        self._engine = engine
        self._tokenizer = tokenizer
        self._agent = vf.AgentInfo(config=vf.AgentConfig(model=model, runtime=SUBPROCESS, harness={"id": HARNESS_ID}))

    async def start(self) -> None:
        """Nothing to bring up."""

    async def run(self, request: RolloutRequest) -> list[Rollout | Failure]:
        """Raises what the engine or the task's scoring raises."""
        started = time.monotonic()
        task = request.example.payload
        session = open_session(self._engine, self._tokenizer, _plan(request, request.index))
        prompt = _prompt_messages(task.data)
        completion = await session.complete([message_to_wire(message) for message in prompt])
        trace = self._trace(task, prompt, completion)
        await task.score(trace)
        return [_scored_trace(request, session, trace, self._columns, time.monotonic() - started)]

    async def close(self) -> None:
        """Nothing to release."""

    def _trace(self, task: vf.Task, prompt: list[Any], completion: Completion) -> vf.Trace:
        """The trace that a run of verifiers would have handed to the task's scoring."""
        nodes = [vf.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(prompt)]
        reply = vf.AssistantMessage(content=completion.text or None)
        usage = vf.Usage(prompt_tokens=completion.num_prompt_tokens, completion_tokens=completion.num_sampled_tokens)
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=self._agent,
            state=state_cls(type(task))(),
            nodes=[*nodes, vf.MessageNode(parent=len(nodes) - 1, message=reply, sampled=True)],
            calls=[vf.ModelCall(node=len(nodes), finish_reason=completion.finish_reason, usage=usage)],
            ok=True,
        )
        trace.stop("agent_completed")
        return trace


class GatewayDriver:
    """The environment's own control flow, with our gateway as its model."""

    def __init__(
        self, env: vf.Env, config: EnvConfig, engine: Model, tokenizer: Tokenizer | None, *, scores_jointly: bool
    ) -> None:
        self._env = env
        self._model, self._columns = config.label, config.state_columns
        self._engine = engine
        self._tokenizer = tokenizer
        self._scores_jointly = scores_jointly
        self._gateway = Gateway(self._model)
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Bring up the gateway, then what the environment serves."""
        self._stack.push_async_callback(self._gateway.close)
        await self._gateway.start()
        await self._stack.enter_async_context(self._env.serving())

    async def run(self, request: RolloutRequest) -> list[Rollout | Failure]:
        """One episode."""
        started = time.monotonic()
        sessions: dict[str, AnySession] = {}

        def minted(trace: vf.Trace) -> None:
            index = len(sessions) if self._scores_jointly else request.index
            sessions[trace.id] = open_session(self._engine, self._tokenizer, _plan(request, index))
            self._gateway.open(trace.id, sessions[trace.id])

        try:
            slot = self._env.slots(request.example.payload)[0]
            episode = await self._env.run_slot(slot, self._context(request), on_trace=minted)
        finally:
            for session_id in sessions:
                self._gateway.discard(session_id)
        return self._outcomes(request, episode, sessions, time.monotonic() - started)

    async def close(self) -> None:
        """Idempotent."""
        await self._stack.aclose()

    def _context(self, request: RolloutRequest) -> vf.ModelContext:
        # No key: the gateway answers to trace ids only. The variable is named so that no real key is ever sent.
        client = vf.EvalClientConfig(base_url=self._gateway.url, api_key_var="TANDEM_GATEWAY_HAS_NO_KEY")
        sampling = vf.SamplingConfig(temperature=request.temperature, max_tokens=request.max_tokens)
        return vf.ModelContext(self._model, client, sampling)

    def _outcomes(
        self, request: RolloutRequest, episode: vf.Episode, sessions: dict[str, AnySession], duration_s: float
    ) -> list[Rollout | Failure]:
        expected = request.group_size if self._scores_jointly else 1
        failed = _episode_failure(episode, sessions)
        # Episodes list traces as they finished; sessions are in the order of the siblings, whatever their speed.
        finished = {trace.id: trace for trace in episode.traces if trace.agent.trainable}
        traces = [finished[trace_id] for trace_id in sessions if trace_id in finished]
        if failed is None and len(traces) != expected:
            message = (
                f"the episode has {len(traces)} trainable traces, expected {expected}: an Env that plays several "
                f"trainable runs declares `{GROUP_SIZE_FIELD}: int` in its config (docs/environments.md)"
            )
            failed = Failure(FailureReason.ENV_ERROR, message)
        if failed is not None:
            return [failed] * expected
        return [_scored_trace(request, sessions[trace.id], trace, self._columns, duration_s) for trace in traces]


class GatewayHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """A chat loop without tools, inside this process: one segment is one model call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for one completion at `endpoint`. The wait is bounded by the rollout's own deadline."""
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in _prompt_messages(data)]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response,
        ):
            text = await response.text()
        failed = response.status != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=text if failed else "")


def load(config: EnvConfig, engine: Model, tokenizer: Tokenizer | None) -> VerifiersAdapter:
    """The environment that `config` names. Raises `UserError`."""
    env, scores_jointly = _load_env(config)
    tasks = _load_tasks(config, env)
    if tokenizer is not None and tokenizer.images is None and any(_has_picture(task.data) for task in tasks):
        raise UserError(f"env {config.id!r} shows pictures, and the model in {tokenizer.folder} does not see any")
    obstacle = "its episodes are groups" if scores_jointly else _obstacle_to_direct(config, env, tasks)
    if config.driver == "direct" and obstacle is not None:
        raise UserError(f"env {config.id!r} cannot use driver 'direct': {obstacle}; use 'auto' or 'gateway'")
    driver: _Driver
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


def _plan(request: RolloutRequest, index: int) -> SamplingPlan:
    """Rollout `index` of the request's group; the siblings of a joint group each draw from their own seed."""
    seed = request.seed if index == request.index else stable_hash("sibling", request.seed, index) >> 16
    return SamplingPlan(f"{request.group_id}#{index}", seed, request.temperature, request.max_tokens)


def _prompt_messages(data: vf.TaskData) -> list[Any]:
    """The conversation that a task opens with."""
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    opening = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*system, *opening]


def _has_picture(data: vf.TaskData) -> bool:
    """Whether a task opens with a picture; later turns show when they come."""
    contents = () if data.prompt is None or isinstance(data.prompt, str) else (each.content for each in data.prompt)
    return any(part.type == "image_url" for content in contents if isinstance(content, list) for part in content)


def _scored_trace(
    request: RolloutRequest, session: AnySession, trace: vf.Trace, columns: Sequence[str], duration_s: float
) -> Rollout | Failure:
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:  # verifiers counts a reward that never came as 0
        reason = FailureReason.ENV_TIMEOUT if trace.is_timeout else FailureReason.ENV_ERROR
        return Failure(reason, f"{session.plan.trajectory_id}: rewards were not computed: {', '.join(unscored)}")
    return scored(
        request,
        session,
        reward=trace.reward,
        metrics=trace.metrics,
        duration_s=duration_s,
        columns=read_columns(request.example.env_name, columns, dict(trace.state)),
    )


def _episode_failure(episode: vf.Episode, sessions: dict[str, AnySession]) -> Failure | None:
    """The first cause that made the episode useless: the engine's before the environment's."""
    engine_errors = [session.failure for session in sessions.values() if session.failure is not None]
    if episode.ok:
        return None
    if engine_errors:
        return failure_of(engine_errors[0])
    error = episode.last_error or next((trace.last_error for trace in episode.traces if not trace.ok), None)
    reason = FailureReason.ENV_TIMEOUT if episode.is_timeout else FailureReason.ENV_ERROR
    return Failure(reason, f"{error.type}: {error.message}" if error is not None else "the episode did not complete")
