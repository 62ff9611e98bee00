"""`orchestrator eval`: environments against servers of ours and of others, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from chat.tokenizer import Tokenizer
from orchestrator.config.algorithm import TeacherConfig
from orchestrator.config.eval import EvalCommandConfig
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.engines.openai import OpenAIModel, base_url
from orchestrator.engines.pool import MAX_FAILURES
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.session import SamplingPlan, Session
from orchestrator.eval.command import evaluate
from orchestrator.eval.report import EvalReport, save_report
from runtime.config.config import parse_config
from runtime.errors import PeerLostError, UserError
from tests.chat.conftest import tokenizer
from tests.inference.conftest import running_client, running_engine
from tests.orchestrator.conftest import env_modules
from tests.orchestrator.engine_server import EngineServer, serving
from tests.orchestrator.engines.test_http_engine import status
from tests.orchestrator.toys import make_config
from tests.support.models import make_model, save_model
from tests.support.process import Process
from tests.support.waiting import until_async


@dataclass
class ForeignServer:
    """Answers with `says(body)`; an exception in it is a 500."""

    says: Callable[[dict[str, Any]], str]
    counts_tokens: bool = True
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    async def models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": "stranger-7b", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        text = self.says(body)
        is_chat = request.path.endswith("/chat/completions")
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 3}} if self.counts_tokens else {}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], **usage})


@asynccontextmanager
async def foreign(server: ForeignServer) -> AsyncIterator[ForeignServer]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


__all__ = ["env_modules", "tokenizer"]
ROOT = Path(__file__).parents[3]
SINGLE = {"id": "edge-single", "rollouts_per_example": 2}


def command(url: str, folder: Path, **changes: Any) -> EvalCommandConfig:
    engines = {"urls": (url,), "start_timeout_s": 30.0, "max_retries": 0} | changes.pop("engines", {})
    return EvalCommandConfig(**({"envs": [SINGLE], "engines": engines, "output": folder} | changes))


async def run(config: EvalCommandConfig) -> EvalReport:
    """As the command does, in a thread: it has a loop of its own."""
    return await asyncio.to_thread(evaluate, config)


@pytest.mark.usefixtures("env_modules")
async def test_any_openai_compatible_server_is_evaluated(tmp_path: Path) -> None:
    async with foreign(ForeignServer(says=lambda body: "1")) as server:
        report = await run(command(server.url, tmp_path))
    assert report.metrics["eval_reward/edge-single/mean"] == pytest.approx(1 / 3)  # "1" answers one of three tasks
    assert report.metrics["eval_pass/edge-single/at_2"] == pytest.approx(1 / 3)
    assert report.metrics["eval_rollouts/edge-single/finished"] == 6
    assert report.metrics["eval_length/edge-single/mean"] == 3
    paths = {path for path, _ in server.asked}
    assert paths == {"/v1/chat/completions"}
    assert {body["model"] for _, body in server.asked} == {"stranger-7b"}
    assert len({body["seed"] for _, body in server.asked}) == 6

    save_report(report, tmp_path)
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert (saved["model"], saved["metrics"], saved["versions"]) == ("stranger-7b", report.metrics, [])
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert sorted((row["example_id"], row["index"]) for row in rows) == [(str(i), k) for i in range(3) for k in (0, 1)]
    assert {row["messages"][-1]["content"] for row in rows} == {"1"}


@pytest.mark.usefixtures("env_modules")
async def test_completions_api_gets_the_rendered_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engines = {"openai": {"api": "completions", "model": "mine"}}
    async with foreign(ForeignServer(says=lambda body: "2", counts_tokens=False)) as server:
        model = {"path": tokenizer.folder}
        report = await run(command(server.url, tmp_path, engines=engines, model=model))
    assert report.metrics["eval_reward/edge-single/mean"] == pytest.approx(1 / 3)
    assert {path for path, _ in server.asked} == {"/v1/completions"}
    body = server.asked[0][1]
    assert body["model"] == "mine"
    assert body["prompt"].startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert body["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.usefixtures("env_modules")
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_bound_on_an_answer_has_the_name_that_the_server_knows(name: str, tmp_path: Path) -> None:
    """A server may refuse the other one, as OpenAI's newer models refuse `max_tokens`."""
    env = SINGLE | {"sampling": {"max_tokens": 7}}
    async with foreign(ForeignServer(says=lambda body: "1")) as server:
        await run(command(server.url, tmp_path, envs=[env], engines={"openai": {"token_limit_key": name}}))
    assert {body[name] for _, body in server.asked} == {7}
    assert {"max_tokens", "max_completion_tokens"} & set(server.asked[0][1]) == {name}


@pytest.mark.usefixtures("env_modules")
async def test_server_that_fails_is_counted_and_named(tmp_path: Path) -> None:
    def fail(body: dict[str, Any]) -> str:
        raise RuntimeError("out of memory")

    async with foreign(ForeignServer(says=fail)) as server:
        report = await run(command(server.url, tmp_path))
    (env,) = report.envs
    assert report.error_rate(env) == 1.0
    assert report.commonest_failure(env).startswith("engine_error: ")
    assert "answered 500" in report.commonest_failure(env)
    assert "eval_reward/edge-single/mean" not in report.metrics


@pytest.mark.usefixtures("env_modules")
async def test_engine_of_ours_that_fails_for_a_while_is_asked_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer.vocab_size, min(tokenizer.eos_ids))
    server = EngineServer(engine=engine, vocab_size=tokenizer.vocab_size, misbehaviours=[status(503)] * MAX_FAILURES)
    async with serving(server):
        engines = {"backend": "http"}
        config = command(
            server.url, tmp_path, engines=engines, model={"path": tokenizer.folder}, max_in_flight=1, timeout_s=60.0
        )
        report = await run(config)
    assert report.metrics["eval_rollouts/edge-single/failed"] == MAX_FAILURES  # and no more: it came back
    assert report.metrics["eval_rollouts/edge-single/finished"] == 6 - MAX_FAILURES


@pytest.mark.usefixtures("env_modules")
async def test_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"is not ready after 0\.3 s"):
        await run(command("http://127.0.0.1:9", tmp_path, engines={"start_timeout_s": 0.3}))


@pytest.mark.usefixtures("env_modules")
async def test_api_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"openai": {"api_key_var": "SOME_KEY"}}
    with pytest.raises(UserError, match="SOME_KEY, which is not set"):
        await run(command("http://127.0.0.1:9", tmp_path, engines=engines))
    monkeypatch.setenv("SOME_KEY", "sesame")
    async with foreign(ForeignServer(says=lambda body: "1")) as server:
        await run(command(server.url, tmp_path, engines=engines))
    assert server.keys == ["Bearer sesame"]


async def test_command_evaluates_the_embedded_engine_over_its_openai_route(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    folder = save_model(tmp_path / "tiny", make_model())
    async with running_engine(folder, eos=True) as engine, running_client(engine, folder) as client:
        flags = ["--engines.urls", json.dumps([str(client.make_url(""))]), "--output", str(tmp_path / "out")]
        config = str(ROOT / "configs" / "copy_text" / "eval.toml")
        evaluation = start("orchestrator", "eval", "@", config, *flags, warm=True)
        await until_async(lambda: evaluation.poll() is not None, 120)
    assert evaluation.poll() == 0, evaluation.output
    assert "Evaluation of tiny" in evaluation.output
    assert "pass@4" in evaluation.output
    saved = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert saved["metrics"]["eval_rollouts/copy-text/finished"] == 128
    assert len((tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()) == 128
    assert not (tmp_path / "out" / "services").exists()  # no run directory, no lock


async def test_openai_teacher_is_tokenized_with_the_policy_tokenizer(tokenizer: Tokenizer) -> None:
    async with foreign(ForeignServer(says=lambda body: "well done")) as server:
        teacher = OpenAIModel((server.url,), TeacherConfig(url=server.url, backend="openai"), name="teacher 'big'")
        await teacher.start()
        session = Session(teacher, tokenizer, SamplingPlan("t#0", 7, 1.0, 32))
        completion = await session.complete([{"role": "user", "content": "hi"}])
        await teacher.close()
    assert completion.text == "well done"
    (branch,) = session.trajectory.branches()
    expected = [*tokenizer.encode("well done").tolist(), min(tokenizer.eos_ids)]
    assert branch.token_ids[branch.sampled].tolist() == expected
    assert branch.versions == ()
    assert not np.any(branch.logprobs)


def test_url_may_have_the_version_or_not() -> None:
    assert {base_url(f"http://h:1{end}") for end in ("", "/", "/v1", "/v1/")} == {"http://h:1/v1"}


def test_training_with_a_server_that_takes_no_weights_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'openai' cannot train: .* takes no weight updates"):
        make_config(tmp_path, engines={"backend": "openai"})


def test_distilling_from_a_server_without_log_probabilities_is_a_config_error(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "teachers": {"big": {"url": "http://127.0.0.1:9", "backend": "openai"}},
        "algorithm": {"type": "opd", "teacher": "big"},
    }
    with pytest.raises(ValueError, match="teacher 'big' is an OpenAI-compatible server"):
        make_config(tmp_path, **changes)
    played = make_config(tmp_path, **changes | {"algorithm": {"type": "sft", "teacher": "big"}})
    assert isinstance(played, OrchestratorConfig)


@pytest.mark.parametrize("engines", [{"backend": "http"}, {"openai": {"api": "completions"}}])
def test_tokens_need_a_tokenizer(engines: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs model\.path"):
        EvalCommandConfig(envs=[SINGLE], engines=engines)


def test_unknown_key_is_named() -> None:
    with pytest.raises(UserError, match="max_step"):
        parse_config(EvalCommandConfig, ["--max-step", "3"], prog="orchestrator eval")
