"""The wiring of one trainer process: from a config to the loop, and everything closed behind it."""

import os
from contextlib import ExitStack

import torch
from loguru import logger

from runtime.errors import ExitCode, PeerLostError
from runtime.metrics.metric_log import MetricLog
from runtime.process.service_process import ServiceProcess
from runtime.process.shutdown import Shutdown
from trainer.batches.fake import FakeSource
from trainer.batches.inbox import Inbox, Reporter
from trainer.batches.link_keys import warn_if_exposed
from trainer.batches.orchestrator import OrchestratorLink
from trainer.batches.replay import ReplaySource
from trainer.batches.source import BatchSource, FinishedRun, NoReports, ProgressReports
from trainer.build import check_ranks, config_digest, fake_vocab_size, make_layout, seed_everything
from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.state import TrainState
from trainer.checks.packing import verify_packing
from trainer.config.trainer import TrainerConfig
from trainer.critic.critic import make_critic
from trainer.loop import Training, train
from trainer.losses.factory import make_loss
from trainer.model.context_parallel import join_context
from trainer.model.fsdp import shard_policy
from trainer.model.policy import Policy, load_policy
from trainer.model.vision import validate_multimodal_pack
from trainer.observe.non_finite import NonFiniteGuard
from trainer.observe.telemetry import Telemetry
from trainer.observe.token_export import TokenExport
from trainer.optimizer import make_optimizer
from trainer.ranks import Ranks, join
from trainer.step.report import TrainProgress
from trainer.weights.channel import WeightChannel, open_channel

SERVICE = "trainer"


def run_trainer(config: TrainerConfig) -> int:
    """Run one rank from start to end; the exit code. Every error that ends it early is raised."""
    with trainer_process(config) as process, ExitStack() as stack:
        trainer = TrainerRank(config, process)
        ranks = join(config.model.device, config.parallel.timeout_s)
        stack.callback(ranks.close)
        check_ranks(config.parallel, ranks.world_size)
        run, progress = trainer.prepare(ranks)
        process.health.ready()
        reason = "failed"
        try:
            with ranks.together_with_peers():
                progress = train(run, progress)
            reason = "the run has ended" if run.inbox.ended else "stopped by a signal"
            if run.inbox.ended and run.publisher.needs_us:
                run.inbox.wait_for_end(progress.step)
        finally:
            process.health.stopping()
            run.publisher.close()
            run.inbox.close(reason)
        trainer.say_end(run, progress, reason)
    return ExitCode.OK


def trainer_process(config: TrainerConfig) -> ServiceProcess:
    """The process of this rank. Its health port counts by machine, not by run: a probe finds the first rank of every
    machine at the port that the config names."""
    rank, local_rank = os.environ.get("RANK"), int(os.environ.get("LOCAL_RANK", "0"))
    port = config.health.port + local_rank if config.health.port else 0
    return ServiceProcess(SERVICE, config, rank=None if rank is None else int(rank), health_port=port)


class TrainerRank:
    """One rank in its process: it loads the model, resumes and connects. Rank 0 has the metrics."""

    def __init__(self, config: TrainerConfig, process: ServiceProcess) -> None:
        self._config = config
        self._process = process
        self._run_dir, self._health = process.run_dir, process.health
        process.announce()
        self._metrics: MetricLog | None = None
        if int(os.environ.get("RANK", "0")) == 0:
            self._metrics = process.open_metrics()
            process.write_config()

    def prepare(self, ranks: Ranks) -> tuple[Training, TrainProgress]:
        config, shutdown = self._config, self._process.shutdown
        seed_everything(config.seed, config.num_threads)
        with shutdown.loading(self._process.leave):
            with self._health.waiting("the model to load"):
                loading = ranks.apart()
                context = join_context(ranks, config.parallel.cp)
                policy = load_policy(config.model, ranks.device, context)
                loading.barrier()  # some disks are slower than others
                sharing = validate_multimodal_pack(policy.images, pack_multimodal=config.pack_multimodal)
                mesh = ranks.mesh(config.parallel.dp_replicate)
                shard_policy(policy, mesh, reshard_after_forward=config.parallel.reshard_after_forward)
                verify_packing(policy, ranks.device)
                critic = make_critic(config, policy, ranks)
                loading.barrier()
            origin = Origin(config.run.name, config_digest(config), config.model.path, policy.adapter)
            checkpoints = Checkpoints(self._run_dir.checkpoints, origin, config.checkpoint, ranks)
            optimizer = make_optimizer(policy.causal_lm, config.optimizer)
            with self._health.waiting("the checkpoint to load"):
                state = TrainState(policy.causal_lm, optimizer, critic)
                progress = checkpoints.resume(state)
        self._say_start(ranks, progress, policy.causal_lm)
        source, reports = self._connect(ranks, progress, shutdown, policy)
        reporter = Reporter(reports, ranks, stop=shutdown, health=self._health)
        checkpoints.report_commits(reporter.committed)
        return Training(
            config=config,
            ranks=ranks,
            layout=make_layout(config, ranks, sharing),
            policy=policy,
            state=state,
            loss=make_loss(config.loss),
            inbox=Inbox(
                source,
                ranks,
                max_steps=config.max_steps,
                stop=shutdown,
                health=self._health,
            ),
            reporter=reporter,
            publisher=self._publisher(ranks, policy),
            checkpoints=checkpoints,
            non_finite=NonFiniteGuard(self._run_dir.path / "non_finite", config.max_non_finite_steps, ranks, source),
            telemetry=Telemetry(self._health, self._metrics),
            token_export=self._token_export(ranks),
        ), progress

    def say_end(self, run: Training, progress: TrainProgress, reason: str) -> None:
        """Where the result is, and what to do with it."""
        if run.ranks.is_first:
            logger.info(f"{reason} after step {progress.step}: {progress.num_tokens:,} tokens trained")
            if progress.step:
                folder = run.checkpoints.folder(progress.step)
                logger.info(f"checkpoint: {folder}")
                logger.info(f"export it: trainer export --checkpoint {folder} --out <folder>")

    def _say_start(self, ranks: Ranks, progress: TrainProgress, model: torch.nn.Module) -> None:
        if ranks.is_first:
            size = sum(parameter.numel() for parameter in model.parameters())
            trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            fresh = "starting from the model's own weights: there is no checkpoint yet"
            start = f"resuming after step {progress.step}, the newest checkpoint" if progress.step else fresh
            where = f"{ranks.world_size} rank(s) on {ranks.device.type}"
            logger.info(f"{self._config.model.path}: {size:,} parameters ({trained:,} trained), {where}, {start}")

    def _publisher(self, ranks: Ranks, policy: Policy) -> WeightChannel:
        adapter = None if policy.adapter is None else policy.adapter.info
        return open_channel(self._config.weights, self._run_dir.weights, self._config.run.name, ranks, adapter)

    def _token_export(self, ranks: Ranks) -> TokenExport | None:
        config = self._config.token_export
        if config is None:
            return None
        folder, writes = config.dir or self._run_dir.token_export, ranks.rank % self._config.parallel.cp == 0
        return TokenExport(config, folder, ranks, self._config.seed, writes=writes)

    def _connect(
        self, ranks: Ranks, progress: TrainProgress, shutdown: Shutdown, policy: Policy
    ) -> tuple[BatchSource, ProgressReports]:
        if self._config.replay is not None:
            return ReplaySource(self._config.replay), NoReports()
        if self._config.data.fake is not None:
            fake = FakeSource(
                self._config.data.fake,
                self._config.run.name,
                seq_len=self._config.model.seq_len,
                vocab_size=fake_vocab_size(policy),
                seed=self._config.seed,
                advantage_is_reward=self._config.critic is not None,
            )
            return fake, NoReports()
        warn_if_exposed(self._config.orchestrator)
        link = OrchestratorLink(
            self._config.orchestrator,
            self._config.run.name,
            ranks,
            last_committed=progress.step,
            health=self._health,
            stop_requested=lambda: shutdown.requested,
        )
        try:
            ranks.wait_together(link.connect)
        except PeerLostError as error:
            if self._config.max_steps is None or progress.step < self._config.max_steps:
                raise
            link.close("the run is complete")
            logger.info(f"step {progress.step} is the last one and durable; no report is needed: {error}")
            return FinishedRun(), NoReports()
        return link, link
