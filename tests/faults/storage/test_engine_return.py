"""Row 6: `kill -9` of real engines in the middle of a run, and their return under the same address."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.engines.http_engine import HttpEngine
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from runtime.errors import ExitCode
from tests.faults.exactly_once.fixed_run import ORCHESTRATOR, FixedRun
from tests.faults.storage.services import TIMEOUT_S, Announcements, EngineProcess, Services
from tests.orchestrator.engine_server import TOKEN, EngineServer, serving
from tests.orchestrator.toys import ToyEnv, make_config, run_orchestrator
from tests.support.fakes import FakeTrainer, training
from tests.support.waiting import until_async
from transport.wire.ledger import tally

pytestmark = pytest.mark.integration
RUN_ID = "toy"
MAX_STEPS = 9
MAX_STALENESS = 1


class PublishingTrainer(FakeTrainer):
    """Publishes real weights."""

    def __init__(self, endpoint: str, source: Announcements) -> None:
        super().__init__(endpoint, may_train=1)
        self._source = source

    def _publish(self, step: int) -> tuple[str, str]:
        weights = self._source.publish(step)
        return weights.location, weights.digest


@pytest.fixture
def engines(tmp_path: Path, model_path: Path) -> Iterator[list[EngineProcess]]:
    token_file = tmp_path / "admin.token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    folders = [tmp_path / "engine-a", tmp_path / "engine-b"]
    started = [EngineProcess(folder, model_path, RUN_ID, token_file) for folder in folders]
    yield started
    for engine in started:
        engine.process.kill()


async def test_killed_engines_cost_no_rollout_and_come_back_with_the_current_weights(
    engines: list[EngineProcess], tmp_path: Path, model_path: Path, log_lines: list[str]
) -> None:
    mortal, other = engines
    urls = [engine.url for engine in engines]
    config = make_config(
        tmp_path / "runs",
        max_steps=MAX_STEPS,
        max_staleness=MAX_STALENESS,
        engines={"urls": urls, "start_timeout_s": TIMEOUT_S, "max_retries": 3},
    )
    trainer = PublishingTrainer(config.server.endpoint, Announcements(tmp_path / "weights", RUN_ID, model_path, keep=3))
    pool = HttpEngine(config.engines, TOKEN)

    async def disturb() -> None:
        await until_async(lambda: 2 in trainer.batches, TIMEOUT_S)
        mortal.process.kill()
        trainer.may_train = 4
        await until_async(
            lambda: f"engine {mortal.url} is out of service, 1 of 2 are left" in "".join(log_lines), TIMEOUT_S
        )
        await until_async(lambda: 5 in trainer.batches, TIMEOUT_S)
        mortal.start()
        await until_async(lambda: f"engine {mortal.url} is back in service" in "".join(log_lines), TIMEOUT_S)
        assert mortal.num_sampled_tokens == 0, "it gets the weights before it gets requests"
        assert mortal.versions[-1] >= 4
        trainer.may_train = 6
        await until_async(lambda: 7 in trainer.batches and mortal.num_sampled_tokens > 0, TIMEOUT_S)
        log_lines.clear()
        mortal.process.kill()
        other.process.kill()
        trainer.may_train = MAX_STEPS
        await until_async(lambda: not pool.availability.is_open, TIMEOUT_S)
        other.start()
        await until_async(lambda: f"engine {other.url} is back in service" in "".join(log_lines), TIMEOUT_S)
        mortal.start()

    with training(trainer):
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(disturb())
            await run_orchestrator(config, pool, [ToyEnv(pool)])
    assert sorted(trainer.batches) == list(range(1, MAX_STEPS + 1))
    for step, samples in trainer.batches.items():
        assert all(step - 1 - span.version <= MAX_STALENESS for sample in samples for span in sample.versions)
    ledger = tally(read_ledger(tmp_path / "runs" / RUN_ID / "ledger" / LEDGER_NAME))
    assert ledger.balances, ledger.problems
    assert not [state for state in ledger.states if state.startswith("failed")], "no rollout was burnt"


async def test_an_outage_that_lasts_ends_in_a_stall_that_names_the_engine(
    fixed_run: FixedRun, services: Services, tmp_path: Path
) -> None:
    run = fixed_run.below(tmp_path / "runs")
    arguments = [*run.orchestrator(), "--stall-timeout-s", "5", "--max-zero-signal-groups", "1000000"]
    async with serving(EngineServer()) as server:
        config = ORCHESTRATOR.replace('backend = "scripted"', f'urls = ["{server.url}"]')
        (run.folder / "orchestrator.toml").write_text(config)
        services.start("orchestrator", arguments)
        await until_async(lambda: server.num_generate > 20 or services.exit_code("orchestrator"), TIMEOUT_S)
    await until_async(lambda: services.exit_code("orchestrator") is not None, TIMEOUT_S)
    output = services.output("orchestrator")
    assert services.exit_code("orchestrator") == ExitCode.STALLED, output
    assert f"engine {server.url} is out of service, 0 of 1 are left" in output
    assert f"scheduler: an engine to come back ({server.url}" in output
    assert " failed: " not in output, "no rollout was burnt"
