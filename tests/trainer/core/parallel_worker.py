"""Real ranks that share rows (context parallelism) or hold copies of the parameters (HSDP)."""

from dataclasses import dataclass, replace

from safetensors.torch import save_file

from tests.support.ranks import GradientRecorder, Rank
from tests.trainer.core.rank_worker import CPU, NO_CLIP
from tests.trainer.core.scenarios import LOSSES, SCENARIOS, SEQ_LEN, Scenario, ordered
from tests.trainer.core.tiny import ENV_NAMES, make_manifest
from trainer.checks.packing import verify_packing
from trainer.config.model import ModelConfig
from trainer.images.samples import check_image_samples
from trainer.losses.factory import make_loss
from trainer.model.context_parallel import join_context
from trainer.model.fsdp import shard_policy
from trainer.model.policy import Policy, load_policy
from trainer.planning.pack import pack_mini_batch
from trainer.planning.plan import plan_step
from trainer.ranks import Ranks
from trainer.step.report import StepReport
from trainer.step.step import StepSettings, train_mini_batch


@dataclass(frozen=True)
class Division:
    """How ranks are divided."""

    world_size: int
    cp: int = 1
    dp_replicate: int = 1

    @property
    def name(self) -> str:
        return f"{self.world_size} ranks, cp {self.cp}, {self.dp_replicate} copies"


FEW = ("packed", "fewer samples than ranks", "gspo", "gspo in mini-batches")
DIVISIONS = {
    Division(2, cp=2): tuple(SCENARIOS),
    Division(2, dp_replicate=2): FEW,
    Division(4, cp=4): FEW,
    Division(4, cp=2): FEW,
    Division(4, dp_replicate=2): FEW,
    Division(4, cp=2, dp_replicate=2): FEW,
}
"""Scenarios that each trains."""


def train_divisions(me: Rank) -> dict[str, object]:
    """Every division of this world size."""
    return {d.name: _train(me, d, names) for d, names in DIVISIONS.items() if d.world_size == me.world_size}


def _train(me: Rank, division: Division, names: tuple[str, ...]) -> dict[str, object]:
    ranks = Ranks(me.rank, me.world_size, CPU)
    context = join_context(ranks, division.cp)
    policy = load_policy(ModelConfig(path=me.model_path, seq_len=SEQ_LEN), CPU, context)
    shard_policy(policy, ranks.mesh(division.dp_replicate), reshard_after_forward=True)
    verify_packing(policy, CPU)
    results: dict[str, object] = {}
    for name in names:
        recorder = GradientRecorder(policy.causal_lm)
        report = _step(policy, recorder, SCENARIOS[name], me, division.cp)
        if me.rank == 0:
            save_file(recorder.gradients, me.out / f"{division.name}, {name}.safetensors")
        results[name] = {"loss": report.metrics["loss"], "metrics": report.metrics}
    return results


def _step(policy: Policy, recorder: GradientRecorder, scenario: Scenario, me: Rank, cp: int) -> StepReport:
    layout = replace(scenario.layout(me.rank, me.world_size), cp=cp)
    samples = ordered(scenario)
    plan = plan_step(make_manifest(samples), layout)
    mine = check_image_samples(
        {row: samples[row] for row in plan.rows_for(layout.dp_rank).tolist()}, None, SEQ_LEN
    ).samples
    micro_batches = pack_mini_batch(plan, 0, layout.dp_rank, mine, cp * scenario.pad_multiple)
    settings = StepSettings(ENV_NAMES, NO_CLIP, scenario.cap, plan.num_units, cp)
    return train_mini_batch(policy, recorder, micro_batches, make_loss(LOSSES[scenario.loss]), settings)
