"""Real ranks that train image samples of both families and write down gradients, counts and a publish."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import GradientRecorder, Rank
from tests.trainer.images.tiny_vlm import IMAGE_TOKEN, MIXED, SEQ_LEN, draw_all
from tests.trainer.rank_worker import CPU
from trainer.checks.packing import verify_packing
from trainer.config.loss import ReinforceLossConfig
from trainer.config.model import ModelConfig
from trainer.images.samples import check_image_samples
from trainer.losses.factory import make_loss
from trainer.losses.protocol import RlOutputs
from trainer.model.fsdp import shard_policy
from trainer.model.logprobs import TokenScores
from trainer.model.policy import Policy, load_policy
from trainer.planning.layout import Layout, RowSharing
from trainer.planning.pack import MicroBatch, pack_mini_batch
from trainer.planning.plan import StepPlan, plan_step
from trainer.ranks import Ranks
from trainer.step.report import StepReport
from trainer.step.step import StepSettings, train_mini_batch
from trainer.weights.files import FilePublisher
from transport.wire.codec import build_batch
from transport.wire.sample import EncodedTensor, TrainingSample

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")


@dataclass(frozen=True)
class ImageScenario:
    drawings: tuple[str, ...]
    cap: int = SEQ_LEN
    sharing: RowSharing = RowSharing.ALL
    pad_multiple: int = 1
    spoiled: tuple[int, ...] = field(default=())
    """Rows whose images do not add up."""

    def samples(self) -> list[TrainingSample]:
        return draw_all(*self.drawings)

    def sound(self) -> list[TrainingSample]:
        return [sample for row, sample in enumerate(self.samples()) if row not in self.spoiled]


SCENARIOS = {
    "mixed": ImageScenario(MIXED),
    "padded": ImageScenario(MIXED, pad_multiple=8),
    "one sample per row": ImageScenario(MIXED, cap=2),
    "modalities apart": ImageScenario(MIXED, sharing=RowSharing.MODALITY),
    "images on one rank only": ImageScenario(("..b.xxxxx", ".....xxxx"), cap=12),
    "images touch": ImageScenario(("s.xxb", "w.xxs", "b..xw", "s.xxbw")),
    "one sample": ImageScenario((".w.xxx",)),
    "text only": ImageScenario(("...xxx", "..xx")),
    "the only images are refused": ImageScenario(("..b.xxxxx", ".....xxxx", "....x"), cap=12, spoiled=(0,)),
}
ROUNDED = (("qwen3_5", "images touch"), ("qwen3_5", "images on one rank only"))
"""Where the linear attention of Qwen3.5 rounds a float32 gradient 1e-5 to 3e-5 away from that in float64, packed or
alone; how far depends on the processor. These are trained in float64, too."""


class LogprobsByRow:
    """A `Watch` that keeps the log probabilities of every sample's trained tokens."""

    def __init__(self) -> None:
        self.rows: dict[int, list[float]] = {}

    def __call__(self, batch: MicroBatch, scores: TokenScores, rl: RlOutputs | None) -> None:
        for segment, row in enumerate(batch.sample_rows):
            assert row not in self.rows, f"row {row} was trained twice"
            self.rows[row] = scores.logprobs[batch.loss_tokens.segments == segment].tolist()


def plan_of(scenario: ImageScenario, rank: int, world_size: int) -> StepPlan:
    layout = Layout(rank, world_size, scenario.cap, SEQ_LEN, sharing=scenario.sharing)
    return plan_step(build_batch("test", 1, scenario.samples()).manifest, layout)


def train(
    policy: Policy, scenario: ImageScenario, rank: int, world_size: int, watch: LogprobsByRow | None = None
) -> tuple[StepReport, dict[str, Tensor]]:
    plan = plan_of(scenario, rank, world_size)
    samples = scenario.samples()
    mine = {row: samples[row] for row in plan.rows_for(rank).tolist()}
    for row in scenario.spoiled:
        if row in mine:
            mine[row] = without_an_image_token(mine[row])
    checked = check_image_samples(mine, policy.image_spec, SEQ_LEN)
    micro_batches = pack_mini_batch(
        plan, 0, rank, checked.samples, scenario.pad_multiple, policy.image_spec, checked.refused
    )
    recorder = GradientRecorder(policy.causal_lm, allow_unused=True)
    settings = StepSettings(plan.env_names, 1e9, scenario.cap)
    report = train_mini_batch(policy, recorder, micro_batches, make_loss(ReinforceLossConfig()), settings, watch)
    return report, recorder.gradients


def without_an_image_token(sample: TrainingSample) -> TrainingSample:
    token_ids = sample.token_ids.numpy().copy()
    token_ids[np.flatnonzero(token_ids == IMAGE_TOKEN)[0]] = 1
    return msgspec.structs.replace(sample, token_ids=EncodedTensor.of(token_ids))


def train_families(me: Rank) -> dict[str, object]:
    """Every scenario of every family; rank 0 leaves gradients."""
    return {family: _work(me, family) for family in FAMILIES}


def _work(me: Rank, family: str) -> dict[str, dict[str, object]]:
    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("dp",))
    config = ModelConfig(path=me.model_path / family, seq_len=SEQ_LEN)
    policy = shard_policy(load_policy(config, CPU), mesh, reshard_after_forward=True)
    verify_packing(policy, CPU)
    results: dict[str, dict[str, object]] = {}
    for name, scenario in SCENARIOS.items():
        logprobs = LogprobsByRow()
        report, gradients = train(policy, scenario, me.rank, me.world_size, logprobs)
        results[name] = {"metrics": report.metrics, "logprobs": logprobs.rows}
        if me.rank == 0:
            save_file(gradients, me.out / f"{family} {name}.safetensors")
    FilePublisher(me.out / family, "test", 2, Ranks(me.rank, me.world_size, CPU)).publish(policy.causal_lm, 0)
    half = load_policy(config.model_copy(update={"dtype": "bfloat16"}), CPU)
    _save_gradients(me, f"{family} bfloat16", shard_policy(half, mesh, reshard_after_forward=False), "mixed")
    exact = shard_policy(load_policy(config, CPU).double(), mesh, reshard_after_forward=True)
    for name in (name for rounded, name in ROUNDED if rounded == family):
        _save_gradients(me, f"{family} {name} float64", exact, name)
    return results


def _save_gradients(me: Rank, title: str, policy: Policy, scenario: str) -> None:
    _, gradients = train(policy, SCENARIOS[scenario], me.rank, me.world_size)
    if me.rank == 0:
        save_file(gradients, me.out / f"{title}.safetensors")
