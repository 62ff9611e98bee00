"""The wiring of one trainer process: from a config to the loop, and everything closed behind it."""

import os
import random
from contextlib import ExitStack

import numpy as np
import torch
import xxhash
from loguru import logger
from prometheus_client import CollectorRegistry

from runtime.base.files import atomic_write
from runtime.config.config import resolved_json
from runtime.errors import ExitCode, PeerLostError, UserError
from runtime.health.health import Health
from runtime.health.server import HealthServer
from runtime.metrics.metric_log import MetricLog
from runtime.process.logging import setup_logging
from runtime.process.shutdown import Shutdown
from runtime.process.watchdog import Watchdog
from runtime.run_dir.run_dir import RunDir, ServiceInfo
from trainer.batch_source import BatchSource
from trainer.checkpoint import Checkpoints, Origin
from trainer.checkpoint_state import TrainState
from trainer.config import ParallelConfig, TrainerConfig
from trainer.context_parallel import join_context
from trainer.critic.learner import make_critic
from trainer.distributed import Ranks, join
from trainer.fake_data import FakeSource
from trainer.finished_run import FinishedRun
from trainer.fsdp import shard_policy
from trainer.images.family import validate_multimodal_pack
from trainer.inbox import Inbox
from trainer.layout import Layout, RowSharing
from trainer.link_keys import warn_if_exposed
from trainer.loop import Training, train
from trainer.losses.factory import make_loss
from trainer.model import Policy, load_policy
from trainer.non_finite import NonFiniteGuard
from trainer.optimizer import make_optimizer
from trainer.oracle import verify_packing
from trainer.orchestrator_link import OrchestratorLink
from trainer.progress import Progress
from trainer.published import WeightChannel
from trainer.replay import ReplaySource
from trainer.telemetry import Telemetry
from trainer.token_export import TokenExport
from trainer.weight_channel import open_channel
from trainer.weighting import Weighting

SERVICE = "trainer"


def run_trainer(config: TrainerConfig) -> int:
    """Run one rank from start to end; the exit code. Every error that ends it early is raised."""
    with ExitStack() as stack:
        shutdown = Shutdown()
        stack.callback(shutdown.close)
        process = TrainerProcess(config, stack)
        ranks = join(config.model.device, config.parallel.timeout_s)
        stack.callback(ranks.close)
        check_ranks(config.parallel, ranks.world_size)
        run, progress = process.prepare(ranks, shutdown)
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
        process.say_end(run, progress, reason)
    return ExitCode.OK


class TrainerProcess:
    """What a rank has besides the training: folder, lock, log, health endpoint, watchdog, metrics."""

    def __init__(self, config: TrainerConfig, stack: ExitStack) -> None:
        self._config = config
        self._rank = int(os.environ.get("RANK", "0"))
        self._run_dir = RunDir(config.run.path).create()
        name = SERVICE if self._rank == 0 else f"{SERVICE}-{self._rank}"
        self._name, self._lock = name, stack.enter_context(self._run_dir.lock(name))
        distributed = "RANK" in os.environ
        setup_logging(SERVICE, config.log, self._run_dir, rank=self._rank if distributed else None)
        self.health = Health(SERVICE, config.stall_timeout_s)
        registry = CollectorRegistry()
        # By machine, not by run: a probe finds the first rank of every machine at the port that the config names.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        port = config.health.port + local_rank if config.health.port else 0
        server = HealthServer(self.health, host=config.health.host, port=port, registry=registry)
        stack.callback(server.close)
        stack.enter_context(Watchdog(self.health, self._run_dir.logs / f"{name}.stacks", run_dir=self._run_dir))
        self._run_dir.announce(name, ServiceInfo(health_url=server.url))
        stack.callback(self._run_dir.withdraw, name)
        self._metrics: MetricLog | None = None
        if self._rank == 0:
            self._metrics = MetricLog(SERVICE, self._run_dir, config.metrics, registry)
            stack.callback(self._metrics.close)
            atomic_write(self._run_dir.config / f"{SERVICE}.json", resolved_json(config).encode())

    def leave(self) -> None:
        """Be gone, as far as others can see."""
        self._run_dir.withdraw(self._name)
        self._lock.release()

    def prepare(self, ranks: Ranks, shutdown: Shutdown) -> tuple[Training, Progress]:
        """Load the model, resume, and connect."""
        config = self._config
        seed_everything(config.seed, config.num_threads)
        with shutdown.loading(self.leave):
            with self.health.waiting("the model to load"):
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
            with self.health.waiting("the checkpoint to load"):
                progress = checkpoints.resume(TrainState(policy.causal_lm, optimizer, critic))
        self._say_start(ranks, progress, policy.causal_lm)
        source = self._connect(ranks, progress, shutdown, policy)
        return Training(
            config=config,
            ranks=ranks,
            layout=make_layout(config, ranks, sharing),
            policy=policy,
            optimizer=optimizer,
            loss=make_loss(config.loss),
            inbox=Inbox(
                source,
                ranks,
                max_steps=config.max_steps,
                stop=shutdown,
                health=self.health,
            ),
            publisher=self._publisher(ranks, policy),
            checkpoints=checkpoints,
            non_finite=NonFiniteGuard(self._run_dir.path / "non_finite", config.max_non_finite_steps, ranks),
            telemetry=Telemetry(self.health, self._metrics),
            token_export=self._token_export(ranks),
            critic=critic,
        ), progress

    def say_end(self, run: Training, progress: Progress, reason: str) -> None:
        """Where the result is, and what to do with it."""
        if run.ranks.is_first:
            logger.info(f"{reason} after step {progress.step}: {progress.num_tokens:,} tokens trained")
            if progress.step:
                folder = run.checkpoints.folder(progress.step)
                logger.info(f"checkpoint: {folder}")
                logger.info(f"export it: trainer export --checkpoint {folder} --out <folder>")

    def _say_start(self, ranks: Ranks, progress: Progress, model: torch.nn.Module) -> None:
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

    def _connect(self, ranks: Ranks, progress: Progress, shutdown: Shutdown, policy: Policy) -> BatchSource:
        if self._config.replay is not None:
            return ReplaySource(self._config.replay)
        if self._config.data.fake is not None:
            return FakeSource(
                self._config.data.fake,
                self._config.run.name,
                seq_len=self._config.model.seq_len,
                vocab_size=fake_vocab_size(policy),
                seed=self._config.seed,
                advantage_is_reward=self._config.critic is not None,
            )
        warn_if_exposed(self._config.orchestrator)
        link = OrchestratorLink(
            self._config.orchestrator,
            self._config.run.name,
            ranks,
            last_committed=progress.step,
            health=self.health,
            stop_requested=lambda: shutdown.requested,
        )
        try:
            ranks.wait_together(link.connect)
        except PeerLostError as error:
            if self._config.max_steps is None or progress.step < self._config.max_steps:
                raise
            link.close("the run is complete")
            logger.info(f"step {progress.step} is the last one and durable; nobody waits for it: {error}")
            return FinishedRun()
        return link


def fake_vocab_size(policy: Policy) -> int:
    """Tokens that random text may hold: those below the image token, which text must not have."""
    size: int = policy.causal_lm.config.get_text_config().vocab_size
    return size if policy.images is None else min(size, policy.images.spec.image_token_id)


def check_ranks(config: ParallelConfig, world_size: int) -> None:
    """Raise `UserError` unless the ranks can be divided as `config` says."""
    if world_size % (config.dp_replicate * config.cp):
        raise UserError(
            f"{world_size} rank(s) cannot be divided by parallel.dp_replicate = {config.dp_replicate} times "
            f"parallel.cp = {config.cp}: start a multiple of {config.dp_replicate * config.cp}"
        )


def make_layout(config: TrainerConfig, ranks: Ranks, sharing: RowSharing = RowSharing.TEXT) -> Layout:
    """How a batch is cut, for this rank."""
    return Layout(
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch_tokens=config.micro_batch_tokens,
        seq_len=config.model.seq_len,
        num_mini_batches=config.mini_batches,
        num_epochs=config.epochs,
        weighting=Weighting(config.weighting),
        seed=config.seed,
        cp=config.parallel.cp,
        sharing=sharing,
    )


def seed_everything(seed: int, num_threads: int) -> None:
    """The same start on every rank: training must not depend on which rank drew which number."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(num_threads)


def config_digest(config: TrainerConfig) -> str:
    """Digest of what decides the weights: a resumed run with another one is a different experiment."""
    plan = {"micro_batch_max_tokens", "mini_batches", "epochs", "weighting", "pack_multimodal"}
    keys = {"model", "max_steps", "seed", "loss", "critic", "optimizer", "schedule"} | plan
    return xxhash.xxh3_128_hexdigest(config.model_dump_json(include=keys).encode())
