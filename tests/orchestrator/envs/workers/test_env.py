"""Environments in real worker processes: the same results as in this process, and no trouble leaks out of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chat.tokenizer import Tokenizer
from orchestrator.config.algorithm import TeacherConfig
from orchestrator.config.envs import EnvConfig
from orchestrator.config.eval import EvalEnvConfig
from orchestrator.engines.protocol import ChatAsk, ChatReply, EngineError, InvalidResponse
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest
from orchestrator.envs.workers.env import MAX_RESTARTS, WorkerEnv, load_in_workers, worker_facts
from orchestrator.envs.workers.link import FROM_WORKER, Ready, receive_blocking
from orchestrator.envs.workers.process import WorkerModel, WorkerProcess
from orchestrator.errors import EnvWorkersLostError
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from orchestrator.teachers.teacher import Teacher
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.errors import UserError
from tests.chat.drawn import vision_folder
from tests.chat.replies import check_branch
from tests.orchestrator.engine_server import EngineServer, serving
from tests.orchestrator.toys import make_config, run_toy
from tests.support.waiting import until, until_async
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.ledger import tally

pytestmark = pytest.mark.usefixtures("env_modules")
PATIENCE_S = 60.0
TOY_COMMAND = (sys.executable, str(Path(__file__).with_name("toy_worker.py")))
TOY = EnvConfig(id="toy", num_workers=1)


def is_alive(pid: int) -> bool:
    """A zombie is not alive."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids_of(env: WorkerEnv) -> list[int]:
    return [worker.process.pid for worker in env.workers.values()]


def random_engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))


@asynccontextmanager
async def started(adapter: EnvAdapter, engine: ScriptedEngine) -> AsyncIterator[EnvAdapter]:
    """Afterwards no task, no process and no generation may be left."""
    before = asyncio.all_tasks()
    pids: list[int] = []
    try:
        await adapter.start()
        pids = pids_of(adapter) if isinstance(adapter, WorkerEnv) else []
        yield adapter
    finally:
        await adapter.close()
        await adapter.close()
    left = asyncio.all_tasks() - before
    await until_async(lambda: all(task.done() for task in left), PATIENCE_S)
    assert not [pid for pid in pids if is_alive(pid)]
    assert engine.num_running == 0


def toy(tokenizer: Tokenizer, engine: ScriptedEngine, max_restarts: int = MAX_RESTARTS, **config: Any) -> WorkerEnv:
    """The real machinery around a toy environment."""
    settings = EnvConfig(**({"id": "toy", "num_workers": 1} | config))
    return load_in_workers(settings, engine, tokenizer.folder, TOY_COMMAND, max_restarts)


def request_for(adapter: EnvAdapter, example: int = 0, **changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {
        "example": adapter.examples[example],
        "group_id": f"{adapter.name}/{adapter.examples[example].example_id}/0",
        "index": 0,
        "group_size": 2,
        "seed": 11,
        "temperature": 0.9,
        "max_tokens": 16,
        "timeout_s": PATIENCE_S,
    }
    return RolloutRequest(**(fields | changes))


def plain(results: Sequence[Rollout | RolloutFailure]) -> list[object]:
    """What two runs of the same request must have in common."""
    return [
        result
        if isinstance(result, RolloutFailure)
        else (
            result.env_name,
            result.example_id,
            result.reward,
            [(b.token_ids.tolist(), b.sampled.tolist(), b.logprobs.tolist(), b.versions) for b in result.branches],
            [None if b.observed is None else b.observed.tolist() for b in result.branches],
            result.is_truncated,
            result.metrics,
            list(result.messages),
            dict(result.sampling_args),
            {name: bytes(value) for name, value in result.columns.items()},
        )
        for result in results
    ]


@pytest.mark.parametrize(
    ("env_id", "columns"),
    [
        pytest.param("edge-notes", ("seen", "best"), id="state columns"),
        pytest.param("edge-race", (), id="joint scoring"),
        pytest.param("edge-two-turns", (), id="two turns", marks=pytest.mark.slow),
    ],
)
async def test_workers_return_what_the_environment_returns_in_this_process(
    tokenizer: Tokenizer, env_id: str, columns: tuple[str, ...]
) -> None:
    outcomes = []
    for num_workers in (0, 1):
        config = EnvConfig(id=env_id, num_workers=num_workers, state_columns=columns, group_size=2)
        engine = random_engine(tokenizer)
        async with started(load_env(config, engine, tokenizer), engine) as adapter:
            assert isinstance(adapter, WorkerEnv) == bool(num_workers)
            ids = [example.example_id for example in adapter.examples]
            results = await adapter.run(request_for(adapter))
            for result in results:
                assert isinstance(result, Rollout), result
                for branch in result.branches:
                    check_branch(branch)
            outcomes.append((adapter.name, ids, adapter.scores_jointly, plain(results)))
    assert outcomes[0] == outcomes[1]


async def test_runs_are_spread_over_the_workers(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine, num_workers=2), engine) as adapter:
        assert isinstance(adapter, WorkerEnv)
        used: set[float] = set()
        for _ in range(50):  # a worker that is slow to beat on a busy machine is spared for a while
            runs = [adapter.run(request_for(adapter, example=index % 2, index=index)) for index in range(8)]
            rollouts = [result for results in await asyncio.gather(*runs) for result in results]
            assert [getattr(rollout, "example_id", rollout) for rollout in rollouts] == ["first", "second"] * 4
            used |= {rollout.metrics["pid"] for rollout in rollouts if isinstance(rollout, Rollout)}
            if len(used) == 2:
                break
        assert used == set(pids_of(adapter))


async def test_rollouts_in_different_workers_share_one_copy_of_their_image(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(vision_folder(tmp_path))
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine, num_workers=2), engine) as adapter:
        rollouts: list[Rollout] = []
        for _ in range(50):
            runs = [adapter.run(request_for(adapter, group_id="image/0/0", seed=index)) for index in range(8)]
            results = [result for results in await asyncio.gather(*runs) for result in results]
            rollouts += [result for result in results if isinstance(result, Rollout)]  # some sample a placeholder
            if len({rollout.metrics["pid"] for rollout in rollouts}) == 2:
                break
    images = {id(rollout.branches[0].images) for rollout in rollouts}
    assert len({rollout.metrics["pid"] for rollout in rollouts}) == 2
    assert len(images) == 1
    assert rollouts[0].branches[0].images is not None


async def test_blocking_environment_leaves_the_loop_of_the_orchestrator_free(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The environment blocks until this loop has turned: in the same process both would wait for ever."""
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine), engine) as adapter:
        blocked = asyncio.create_task(adapter.run(request_for(adapter, group_id=f"block{tmp_path}")))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not blocked.done()
        (tmp_path / "free").touch()
        (result,) = await blocked
    assert isinstance(result, Rollout), result


async def test_killed_worker_fails_its_rollouts_and_is_started_again(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(
        tokenizer.vocab_size,
        min(tokenizer.eos_ids),
        latency=lambda request, _: 3600.0 if "held" in request.request_id else 0.0,
    )
    async with started(toy(tokenizer, engine), engine) as adapter:
        assert isinstance(adapter, WorkerEnv)
        held = [asyncio.create_task(adapter.run(request_for(adapter, group_id=f"held/{i}/0"))) for i in range(3)]
        (pid,) = pids_of(adapter)
        await until_async(lambda: engine.num_running == 3, PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        failures = [result for task in held for result in await task]
        assert [getattr(failed, "reason", None) for failed in failures] == [FailureReason.WORKER_LOST] * 3
        assert "SIGKILL" in getattr(failures[0], "message", "")
        assert engine.num_running == 0  # what it had asked for is given up
        (again,) = await adapter.run(request_for(adapter))  # waits for the new one
        assert isinstance(again, Rollout), again
        assert pids_of(adapter) != [pid]
        facts = worker_facts([adapter])
        assert facts == {"env_workers": 1, "env_workers_wanted": 1, "env_worker_restarts": 1, "env_worker_problem": ""}


async def test_worker_that_hangs_past_a_deadline_is_replaced(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine), engine) as adapter:
        assert isinstance(adapter, WorkerEnv)
        (pid,) = pids_of(adapter)
        for _ in range(10):  # on a busy machine the worker may not have been silent for long enough at first
            (failed,) = await adapter.run(request_for(adapter, group_id="hang/0/0", timeout_s=3.0))
            assert isinstance(failed, RolloutFailure)
            if not is_alive(pid) or pid not in pids_of(adapter):
                break
        assert failed.reason is FailureReason.ENV_TIMEOUT
        await until_async(lambda: not is_alive(pid), PATIENCE_S)
        (again,) = await adapter.run(request_for(adapter))
        assert isinstance(again, Rollout), again


async def test_environment_that_always_kills_its_worker_ends_the_run(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine, max_restarts=1), engine) as adapter:
        doomed = request_for(adapter, group_id="die/0/0")
        outcomes = [*await adapter.run(doomed), *await adapter.run(doomed)]
        with pytest.raises(EnvWorkersLostError, match="a worker ended 2 times in a row"):
            await adapter.run(doomed)
    assert [getattr(failed, "reason", None) for failed in outcomes] == [FailureReason.WORKER_LOST] * 2


async def test_failures_of_engine_and_config_reach_the_caller_with_their_reason(tokenizer: Tokenizer) -> None:
    class Failing(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            raise InvalidResponse("NaN") if "invalid" in request.request_id else EngineError("gone")

    engine = Failing(tokenizer.vocab_size, min(tokenizer.eos_ids))
    async with started(toy(tokenizer, engine), engine) as adapter:
        (gone,) = await adapter.run(request_for(adapter))
        (invalid,) = await adapter.run(request_for(adapter, group_id="invalid/0/0"))
        with pytest.raises(UserError, match="'mood'"):
            await adapter.run(request_for(adapter, group_id="misconfigured/0/0"))
    assert gone == RolloutFailure(FailureReason.ENGINE_ERROR, "gone")
    assert invalid == RolloutFailure(FailureReason.INVALID_RESPONSE, "NaN")


async def test_cancelled_rollout_gives_its_generation_up(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=lambda request, _: 3600.0)
    async with started(toy(tokenizer, engine), engine) as adapter:
        run = asyncio.create_task(adapter.run(request_for(adapter)))
        await until_async(lambda: engine.num_running == 1, PATIENCE_S)
        run.cancel()
        await until_async(lambda: engine.num_running == 0, PATIENCE_S)


def test_environment_that_does_not_load_is_one_line(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="'toy' refuses its args"):
        toy(tokenizer, random_engine(tokenizer), num_workers=2, args={"refuse": True})


def test_worker_ends_with_a_killed_orchestrator_even_while_it_is_blocked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = Path(__file__).with_name("orphan_maker.py")
    command = [sys.executable, str(script), str(tokenizer.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        try:
            assert is_alive(worker)
        finally:
            parent.kill()
    until(lambda: not is_alive(worker), PATIENCE_S)


def test_environments_of_an_evaluation_have_workers_too() -> None:
    assert EvalEnvConfig(id="toy", num_workers=3).as_env.num_workers == 3


async def test_teacher_plays_an_environment_in_workers(tokenizer: Tokenizer) -> None:
    """`sft`: what the worker asks for is answered by the teacher, whose tokens have no version."""
    server = EngineServer(engine=random_engine(tokenizer), vocab_size=tokenizer.vocab_size)
    async with serving(server):
        teacher = Teacher("big", TeacherConfig(url=server.url), tokenizer.vocab_size)
        adapter = load_in_workers(TOY, teacher, tokenizer.folder, TOY_COMMAND)
        await teacher.start()
        async with started(adapter, server.engine):
            (rollout,) = await adapter.run(request_for(adapter))
        await teacher.close()
    assert isinstance(rollout, Rollout), rollout
    assert rollout.branches[0].versions == ()
    assert server.num_generate == 1


async def test_run_goes_on_when_a_worker_is_killed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids), latency=lambda request, _: 0.05)
    config = make_config(tmp_path, envs=[TOY.model_dump() | {"group_size": 4}], max_steps=3)
    adapter = load_in_workers(config.envs[0], engine, tokenizer.folder, TOY_COMMAND)

    async def kill_one() -> None:
        await until_async(lambda: engine.num_running > 0, PATIENCE_S)
        os.kill(pids_of(adapter)[0], signal.SIGKILL)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kill_one())
        trainer = await run_toy(config, engine, [adapter])
    assert sorted(trainer.batches) == [1, 2, 3]
    result = tally(read_ledger(config.run.path / "ledger" / LEDGER_NAME))
    assert result.balances, result.problems
    assert result.states["failed:worker_lost"] > 0
    assert adapter.num_restarts == 1


async def test_worker_plays_a_model_that_speaks_text(tokenizer: Tokenizer) -> None:
    class Talker:
        async def chat(self, ask: ChatAsk) -> ChatReply:
            return ChatReply(
                text=f"{len(ask.messages)}", finish_reason="stop", num_prompt_tokens=4, num_sampled_tokens=1
            )

    adapter = load_in_workers(TOY, Talker(), tokenizer.folder, TOY_COMMAND)
    async with started(adapter, random_engine(tokenizer)):
        (rollout,) = await adapter.run(request_for(adapter))
    assert isinstance(rollout, Rollout), rollout
    assert rollout.messages[-1]["content"] == "1"


def test_worker_ends_well_when_its_work_is_over(tokenizer: Tokenizer) -> None:
    process = WorkerProcess(TOY, WorkerModel(tokenizer.folder), TOY_COMMAND)
    try:
        assert isinstance(receive_blocking(process.end_of_link, FROM_WORKER, PATIENCE_S), Ready)
    finally:
        ending = process.end(PATIENCE_S)
    assert ending == "exit code 0"


async def test_worker_that_dies_too_often_ends_the_run_although_others_live(tokenizer: Tokenizer) -> None:
    engine = random_engine(tokenizer)
    async with started(toy(tokenizer, engine, max_restarts=1, num_workers=2), engine) as adapter:
        assert isinstance(adapter, WorkerEnv)
        keepers = [task for task in asyncio.all_tasks() if task.get_name().startswith("worker ")]
        async with asyncio.timeout(PATIENCE_S):
            while not all(task.done() for task in keepers):  # then nobody is started again
                if adapter.num_up == 2:
                    await adapter.run(request_for(adapter, group_id="die/0/0"))
                await asyncio.sleep(0.01)
        with pytest.raises(EnvWorkersLostError, match="a worker ended 2 times in a row"):
            await adapter.run(request_for(adapter))
