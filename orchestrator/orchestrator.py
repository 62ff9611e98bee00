"""`Orchestrator`: wires the parts. No part knows it; each wakes the others through callbacks that it is given.

     examples            rollouts            groups             batch N
    ExampleOrder ──▶ Scheduler ──▶ Collector ──▶ BatchAssembler ──▶ Batcher ──▶ Outbox ══ BatchServer ══▶ trainer
                      ▲    │ tokens                                                                       │
                      │    ▼                                                                              ▼
           WeightUpdates.live ◀── verified ── engines ◀── WeightUpdates ◀══ BatchServer ◀══ weights announced

| loop      | consumes               | produces        | waits for                       | unblocked by                |
|-----------|------------------------|-----------------|---------------------------------|-----------------------------|
| scheduler | examples, free slots   | rollouts        | staleness, slot, engine; curric.| finished rollout, version   |
| collector | rollouts and failures  | final groups    | all members accounted for       | last member (has no task)   |
| batcher   | complete batches       | durable batch N | final groups; < `max_ahead`     | final group; `Trained`      |
| server    | requests of the ranks  | answers         | a request                       | the trainer                 |
| policy    | weight announcements   | live version    | every engine in service: seen   | an engine's reply; retries  |
| pool      | engines that left      | engines back    | health and the right weights    | an engine's reply; retries  |
| evaluator | versions that are due  | figures         | a due version; its rollouts     | version; `eval.timeout_s`   |
| adapting  | load of the engines    | slots           | 2 s to pass (`PERIOD_S`)        | the clock                   |
| status    | what this side awaits  | news for people | half a second to pass           | the clock                   |
| watch     | health of the engines  | news for people | a second to pass                | the clock                   |

Bounds: running rollouts <= `max_in_flight`; those that run, wait or lie untrained < `(max_staleness + 1) * batch_size`
plus less than a group per batch (`batches/staleness_policy.py`; under `staleness_policy = "drop"`, plus
`max_in_flight`); untrained batches <= `max_ahead`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from loguru import logger

from orchestrator.batches.assembler import BatchAssembler
from orchestrator.batches.batcher import Batcher, BatchWriter
from orchestrator.batches.staleness_policy import make_policy
from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.data.curriculum import make_curricula
from orchestrator.data.examples import EnvShare, ExampleOrder
from orchestrator.engines.protocol import Engine, EngineError
from orchestrator.envs.protocol import EnvAdapter, close_adapter
from orchestrator.eval.evaluator import Evaluator
from orchestrator.groups.collector import Collector
from orchestrator.groups.scheduler import EnvRunner, Scheduler
from orchestrator.groups.scoring import FailureGuard, SignalGuard, group_rules, normalise_batch
from orchestrator.policy.canary import canary_check
from orchestrator.policy.concurrency import PERIOD_S, Bounds, ConcurrencyController
from orchestrator.policy.weight_updates import WeightUpdates
from orchestrator.records.history import HISTORY_NAME, History
from orchestrator.records.ledger import LEDGER_NAME, Ledger
from orchestrator.records.rollout_log import RolloutLog
from orchestrator.records.state import STATE_NAME, describe_order, load_state, resume
from orchestrator.report.metrics import StepTimes, step_line, step_metrics
from orchestrator.report.status import EngineWatch, StatusReporter
from orchestrator.teachers.scored_env import AnyTeacher
from orchestrator.values.group import AssembledBatch
from runtime.errors import PeerLostError, StorageError, UserError
from runtime.health.health import Fact, Health
from runtime.metrics.metric_log import MetricLog
from runtime.run_dir.run_dir import RunDir
from transport.errors import OutboxError, OutboxVersionError
from transport.outbox.outbox import Outbox
from transport.server.server import BatchServer
from transport.wire.ledger import CancelReason

LINGER_POLL_S = 0.05


class Orchestrator:
    """One run, from where its run directory stands to `max_steps`. `server` must be entered (bound) by the caller."""

    def __init__(
        self,
        config: OrchestratorConfig,
        run_dir: RunDir,
        engine: Engine,
        adapters: Sequence[EnvAdapter],
        server: BatchServer,
        health: Health,
        metrics: MetricLog,
        eval_adapters: Sequence[EnvAdapter] = (),
        teachers: Sequence[AnyTeacher] = (),
        more_facts: Callable[[], Mapping[str, Fact]] = dict,
        concurrency_period_s: float = PERIOD_S,
    ) -> None:
        self._config = config
        self._engine = engine
        self._adapters = adapters
        self._eval_adapters = eval_adapters
        self._teachers = teachers
        self._concurrency_period_s = concurrency_period_s
        self._server = server
        self._health = health
        self._metrics = metrics
        sizes = [len(adapter.examples) for adapter in adapters]
        shares = [
            EnvShare(env.label, size, env.ratio, env.refresh_groups)
            for env, size in zip(config.envs, sizes, strict=True)
        ]
        self._curricula = make_curricula(config, sizes)
        self._rules = group_rules(config)
        self._open(run_dir, describe_order(config.seed, shares))
        self._weight_updates = WeightUpdates(
            engine,
            server,
            health,
            update_timeout_s=config.engines.update_timeout_s,
            on_live=self._new_version,
            verify=canary_check(engine, config.engines).check,
        )
        self._scheduler = self._make_scheduler(ExampleOrder(config.seed, shares, self._curricula.by_env))
        self._evaluator = Evaluator(
            config.eval,
            eval_adapters,
            self._weight_updates,
            run_dir.report,
            health,
            seed=config.seed,
            max_steps=config.max_steps,
            log=metrics.log,
        )
        self._batcher = self._make_batcher()
        self._status = StatusReporter(
            server,
            self._assembler,
            health,
            in_flight=lambda: self._scheduler.in_flight,
            batch_size=config.batch_size,
            more_facts=more_facts,
        )
        self._last_shipped = (time.monotonic(), 0.0, 0.0)

    def _open(self, run_dir: RunDir, order: str) -> None:
        """Everything durable, as the process before left it."""
        config, next_step = self._config, self._server.outbox.next_step
        state = load_state(run_dir.state / STATE_NAME)
        done = resume(state, next_step, run_id=config.run.name, order=order)
        self._ledger = Ledger(run_dir.ledger / LEDGER_NAME, done)
        self._assembler = BatchAssembler(
            make_policy(config), next_step, done, lambda groups: normalise_batch(groups, self._rules)
        )
        rollout_log = RolloutLog(run_dir.rollouts if config.save_rollouts else None)
        history = History(run_dir.state / HISTORY_NAME, next_step, self._curricula) if self._curricula.by_env else None
        self._writer = BatchWriter(
            config.run.name, order, done, run_dir.state / STATE_NAME, self._ledger, history, rollout_log
        )

    def _make_scheduler(self, order: ExampleOrder) -> Scheduler:
        config = self._config
        collector = Collector(
            self._assembler,
            self._ledger,
            self._rules,
            FailureGuard(config.max_error_rate),
            SignalGuard(config.max_zero_signal_groups),
            on_final=self._wake_batcher,
            observe=self._curricula.saw,
        )
        envs = {env.label: EnvRunner(env, adapter) for env, adapter in zip(config.envs, self._adapters, strict=True)}
        return Scheduler(
            envs,
            order,
            collector,
            lambda: self._weight_updates.live,
            config.seed,
            self._health,
            self._engine.availability,
            max_in_flight=config.max_in_flight,
        )

    def _make_batcher(self) -> Batcher:
        return Batcher(
            self._assembler,
            self._server,
            self._ledger,
            self._writer,
            self._health,
            max_ahead=self._config.server.max_ahead,
            max_steps=self._config.max_steps,
            on_shipped=self._report,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until step `max_steps` is committed, or until `stop` is set. Leaves no task and no open file behind."""
        async with AsyncExitStack() as closing:
            closing.callback(self._close_ledger)
            closing.push_async_callback(self._engine.close)
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._work(closing))
                stopping = tasks.create_task(stop.wait())
                await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    logger.info("stopping: rollouts in flight are cancelled, and made again when the run goes on")
                self._health.stopping()
                work.cancel()
                stopping.cancel()

    async def _work(self, closing: AsyncExitStack) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._server.serve())
            reporting = tasks.create_task(self._status.run())
            await self._start(closing)
            following = tasks.create_task(self._weight_updates.run())
            scheduling = tasks.create_task(self._scheduler.run())
            evaluating = tasks.create_task(self._evaluator.run())
            adapting = tasks.create_task(self._adapt())
            watching = tasks.create_task(EngineWatch(self._engine, self._health).run())
            await self._batcher.run()
            scheduling.cancel()  # the last batch is cut: nothing more is needed
            await self._until_trained()
            weights = self._server.weights
            await self._evaluator.finish(evaluating, last_version=0 if weights is None else weights.version)
            for loop in (serving, following, reporting, adapting, watching):
                loop.cancel()

    async def _adapt(self) -> None:
        """Let the number of rollouts follow the load of the engines, if asked to."""
        config = self._config
        if config.concurrency == "adaptive":
            await ConcurrencyController(
                self._engine.load,
                lambda: self._scheduler.in_flight,
                self._scheduler.set_max_in_flight,
                Bounds(config.largest_group, config.max_in_flight),
                period_s=self._concurrency_period_s,
            ).run()

    async def _start(self, closing: AsyncExitStack) -> None:
        """Engines, then the weights they should serve, then teachers and environments. Every wait has its deadline."""
        timeout_s = self._config.engines.start_timeout_s
        urls = self._config.engines.urls
        with self._health.waiting(f"the engines {', '.join(urls)}", peer=urls):
            try:
                await self._engine.start()
            except EngineError as error:
                raise PeerLostError(str(error)) from error
        await self._weight_updates.start(newest_batch=self._server.outbox.next_step - 1, timeout_s=timeout_s)
        for teacher in self._teachers:
            closing.push_async_callback(teacher.close)
            with self._health.waiting(f"the {teacher}", peer=teacher.urls):
                await teacher.start()
        for adapter in (*self._adapters, *self._eval_adapters):
            closing.push_async_callback(close_adapter, adapter)
            with self._health.waiting(f"environment {adapter.name} to start"):
                await adapter.start()
        self._health.ready()
        logger.info("collecting batch {} of {}", self._server.outbox.next_step, self._config.max_steps)

    async def _until_last_version_lives(self) -> None:
        """Only then is the run at its end: a trainer may hold the weights in its memory, and leaves when it hears so.

        The engines get the time of two tries, and that of an evaluation, which pins the version before; should they not
        take it, the run ends without.
        """
        last_step = self._config.max_steps
        with self._health.waiting(f"the trainer to train step {last_step}", peer="trainer"):
            await self._server.until(lambda: self._server.last_trained >= last_step)
        weights = self._server.weights
        if weights is not None:
            pinned_s = self._config.eval.timeout_s if self._config.eval.envs else 0.0
            timeout_s = 2 * self._config.engines.update_timeout_s + pinned_s
            try:
                await self._weight_updates.wait_live(weights.version, timeout_s)
            except TimeoutError:
                logger.warning("the engines did not take version {} within {:g} s", weights.version, timeout_s)
        self._server.end(last_step)

    async def _until_trained(self) -> None:
        """The last batch is cut: wait until it is committed, then until the trainer has heard that this is the end.

        A trainer that comes back from an older checkpoint, because it cannot read the last one, is waited for again.
        """
        last_step = self._config.max_steps
        await self._until_last_version_lives()
        while True:
            with self._health.waiting(f"the trainer to commit step {last_step}", peer="trainer"):
                await self._server.until(lambda: self._server.last_committed >= last_step)
            await self._until_trainer_leaves()
            if self._server.last_committed >= last_step:
                break
        logger.info("all {} steps are trained and committed", last_step)

    async def _until_trainer_leaves(self) -> None:
        """It should have left soon; or it never comes; or it has to make up for a step that was committed."""
        deadline = time.monotonic() + 2 * self._config.server.peer_timeout_s
        was_here = False
        while time.monotonic() < deadline and self._server.last_committed >= self._config.max_steps:
            is_here = any(peer.alive for peer in self._server.peers())
            if was_here and not is_here:
                break
            was_here = was_here or is_here
            await asyncio.sleep(LINGER_POLL_S)

    def _close_ledger(self) -> None:
        finished = self._server.outbox.next_step > self._config.max_steps
        self._ledger.cancelled(self._writer.done, CancelReason.END_OF_RUN if finished else CancelReason.SHUTDOWN)
        try:
            self._ledger.close()
        except OSError as error:
            raise StorageError(f"the ledger cannot be written: {error}") from error

    def _new_version(self) -> None:
        self._scheduler.notify()
        self._evaluator.notify()

    def _wake_batcher(self) -> None:
        self._batcher.notify()

    async def _report(self, batch: AssembledBatch) -> None:
        """A batch is durable and announced. The numbers are added up in a thread: a batch may hold thousands."""
        now, policy_s, trainer_s = (
            time.monotonic(),
            self._scheduler.waited_for_policy_s,
            self._batcher.waited_for_trainer_s,
        )
        last_at, last_policy_s, last_trainer_s = self._last_shipped
        self._last_shipped = (now, policy_s, trainer_s)
        times = StepTimes(
            duration_s=now - last_at,
            waited_for_policy_s=policy_s - last_policy_s,
            waited_for_trainer_s=trainer_s - last_trainer_s,
            in_flight=self._scheduler.in_flight,
            live_version=self._weight_updates.live,
        )
        values = await asyncio.to_thread(step_metrics, batch, times)
        values |= {f"update/{phase}": seconds for phase, seconds in self._weight_updates.update_times.items()}
        await asyncio.to_thread(self._metrics.log, batch.step, values)
        self._health.progress(step=batch.step, version=self._weight_updates.live, in_flight=self._scheduler.in_flight)
        logger.info(step_line(batch.step, self._config.max_steps, values))


def open_outbox(run_dir: RunDir, run_id: str, *, keep_retired: bool = False) -> Outbox:
    """The durable batches of the run. Raises `StorageError` when they cannot be trusted, `UserError` when another
    version of tandem-rl wrote them."""
    try:
        return Outbox(run_dir.outbox, run_id, keep_retired=keep_retired)
    except OutboxVersionError as error:
        raise UserError(str(error)) from error
    except OutboxError as error:
        raise StorageError(str(error)) from error
