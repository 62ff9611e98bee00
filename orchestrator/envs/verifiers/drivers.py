"""Two drivers, with the same result: `direct` (one request, one scoring) and `gateway` (verifiers' own agents)."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.state import state_cls

from chat.tokenizer import Tokenizer
from orchestrator.config.envs import EnvConfig
from orchestrator.data.seeds import stable_hash
from orchestrator.engines.protocol import Model
from orchestrator.envs.gateway import Gateway
from orchestrator.envs.protocol import RolloutRequest, failure_of, read_columns, scored
from orchestrator.envs.session import AnySession, ChatTurn, SamplingPlan, open_session
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure

HARNESS_ID = "tandem_harness"


GROUP_SIZE_FIELD = "group_size"
"""An `Env` whose config has this field runs a whole group as one episode and scores it jointly."""


SUBPROCESS = {"type": "subprocess"}


class Driver(Protocol):
    async def start(self) -> None: ...

    async def run(self, request: RolloutRequest) -> list[Rollout | RolloutFailure]: ...

    async def close(self) -> None: ...


class DirectDriver:
    """One prompt, one completion, the task's own scoring."""

    def __init__(self, config: EnvConfig, engine: Model, tokenizer: Tokenizer | None) -> None:
        model, self._columns = config.label, config.state_columns
        self._engine = engine
        self._tokenizer = tokenizer
        self._agent = vf.AgentInfo(config=vf.AgentConfig(model=model, runtime=SUBPROCESS, harness={"id": HARNESS_ID}))

    async def start(self) -> None:
        """Nothing to bring up."""

    async def run(self, request: RolloutRequest) -> list[Rollout | RolloutFailure]:
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

    def _trace(self, task: vf.Task, prompt: list[Any], completion: ChatTurn) -> vf.Trace:
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

    async def run(self, request: RolloutRequest) -> list[Rollout | RolloutFailure]:
        """Play one episode of verifiers, whose agents ask the gateway for tokens."""
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
        await self._stack.aclose()

    def _context(self, request: RolloutRequest) -> vf.ModelContext:
        # No key: the gateway answers to trace ids only. The variable is named so that no real key is ever sent.
        client = vf.EvalClientConfig(base_url=self._gateway.url, api_key_var="TANDEM_GATEWAY_HAS_NO_KEY")
        sampling = vf.SamplingConfig(temperature=request.temperature, max_tokens=request.max_tokens)
        return vf.ModelContext(self._model, client, sampling)

    def _outcomes(
        self, request: RolloutRequest, episode: vf.Episode, sessions: dict[str, AnySession], duration_s: float
    ) -> list[Rollout | RolloutFailure]:
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
            failed = RolloutFailure(FailureReason.ENV_ERROR, message)
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


def _plan(request: RolloutRequest, index: int) -> SamplingPlan:
    """Rollout `index` of the request's group; the siblings of a joint group each draw from their own seed."""
    seed = request.seed if index == request.index else stable_hash("sibling", request.seed, index) >> 16
    return SamplingPlan(f"{request.group_id}#{index}", seed, request.temperature, request.max_tokens)


def _prompt_messages(data: vf.TaskData) -> list[Any]:
    """The conversation that a task opens with."""
    system = [] if data.system_prompt is None else [vf.SystemMessage(content=data.system_prompt)]
    opening = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*system, *opening]


def _scored_trace(
    request: RolloutRequest, session: AnySession, trace: vf.Trace, columns: Sequence[str], duration_s: float
) -> Rollout | RolloutFailure:
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:  # verifiers counts a reward that never came as 0
        reason = FailureReason.ENV_TIMEOUT if trace.is_timeout else FailureReason.ENV_ERROR
        return RolloutFailure(reason, f"{session.plan.trajectory_id}: rewards were not computed: {', '.join(unscored)}")
    return scored(
        request,
        session,
        reward=trace.reward,
        metrics=trace.metrics,
        duration_s=duration_s,
        columns=read_columns(request.example.env_name, columns, dict(trace.state)),
    )


def _episode_failure(episode: vf.Episode, sessions: dict[str, AnySession]) -> RolloutFailure | None:
    """The first cause that made the episode useless: the engine's before the environment's."""
    engine_errors = [session.failure for session in sessions.values() if session.failure is not None]
    if episode.ok:
        return None
    if engine_errors:
        return failure_of(engine_errors[0])
    error = episode.last_error or next((trace.last_error for trace in episode.traces if not trace.ok), None)
    reason = FailureReason.ENV_TIMEOUT if episode.is_timeout else FailureReason.ENV_ERROR
    return RolloutFailure(
        reason, f"{error.type}: {error.message}" if error is not None else "the episode did not complete"
    )
