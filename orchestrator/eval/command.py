"""`orchestrator eval @ file.toml`: environments against a server, alone: no trainer, no run directory, no lock."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime

import uvloop
from loguru import logger
from rich.console import Console

from chat.tokenizer import Tokenizer
from orchestrator.config.eval import EvalCommandConfig
from orchestrator.engines.factory import make_eval_model
from orchestrator.engines.openai import OpenAIModel
from orchestrator.engines.protocol import Engine, EngineError
from orchestrator.envs.loading import load_env
from orchestrator.envs.protocol import EnvAdapter, close_adapter
from orchestrator.eval.playing import Envs, Outcomes, play, unplayed
from orchestrator.eval.report import RESULT_NAME, EvalReport, report_table, save_report
from runtime.config.config import parse_config, resolved_json
from runtime.errors import ExitCode, PeerLostError, StorageError
from runtime.process.logging import setup_logging

TABLE_WIDTH = 160
"""Columns of the table where the output is not a terminal."""


def main(argv: Sequence[str]) -> int:
    """0: evaluated; 1: too many rollouts of an environment failed. Raises `UserError` (2), `PeerLostError` (76) if the
    server does not answer, `StorageError` (74)."""
    config = parse_config(EvalCommandConfig, argv, prog="orchestrator eval")
    if config.dry_run:
        sys.stdout.write(resolved_json(config) + "\n")
        return ExitCode.OK
    setup_logging("eval", config.log, None)
    report = evaluate(config)
    try:
        save_report(report, config.output)
    except OSError as error:
        raise StorageError(f"the evaluation cannot be saved in {config.output}: {error}") from error
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(report_table(report))
    sys.stdout.write(f"{config.output / RESULT_NAME}\n")
    return _exit_code(config, report)


def evaluate(config: EvalCommandConfig) -> EvalReport:
    """Load the environments and play them. Raises `UserError`, `PeerLostError`."""
    tokenizer = None if config.model is None else Tokenizer.from_folder(config.model.path)
    model = make_eval_model(config, tokenizer)
    adapters = [load_env(env.as_env, model, tokenizer) for env in config.envs]
    started_at, started = datetime.now(UTC), time.monotonic()
    outcomes = uvloop.run(_play(config, model, adapters))
    facts = {
        "model": model.model if isinstance(model, OpenAIModel) else str(config.model and config.model.path),
        "backend": config.engines.backend,
        "urls": config.engines.urls,
        "seed": config.seed,
        "started_at": started_at.isoformat(timespec="seconds"),
        "duration_s": round(time.monotonic() - started, 3),
        "envs": [env.model_dump(mode="json") for env in config.envs],
    }
    return EvalReport(config.envs, outcomes, facts)


async def _play(config: EvalCommandConfig, model: Engine | OpenAIModel, adapters: Sequence[EnvAdapter]) -> Outcomes:
    envs: Envs = list(zip(config.envs, adapters, strict=True))
    outcomes = unplayed(envs)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(model.close)
        for adapter in adapters:
            closing.push_async_callback(close_adapter, adapter)
        try:
            await model.start()
        except EngineError as error:
            raise PeerLostError(str(error)) from error
        for adapter in adapters:
            await adapter.start()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(_keep_in_service(model))
            try:
                async with asyncio.timeout(config.timeout_s):
                    await play(envs, outcomes, 0, seed=config.seed, max_in_flight=config.max_in_flight)
            except TimeoutError:
                logger.warning("the evaluation took over {:g} s: what is not finished failed", config.timeout_s)
            keeping.cancel()
    return outcomes


async def _keep_in_service(model: Engine | OpenAIModel) -> None:
    """Bring engines back that did not answer for a while."""
    if not isinstance(model, OpenAIModel):
        await model.keep_in_service()


def _exit_code(config: EvalCommandConfig, report: EvalReport) -> int:
    code = ExitCode.OK
    for env in config.envs:
        rate = report.error_rate(env)
        if rate > config.max_error_rate:
            code = ExitCode.FAILED
            why = report.commonest_failure(env)
            logger.error("{:.0%} of the rollouts of {} failed, mostly with {}", rate, env.label, why)
    return code
