"""Ranks that share rows, or hold copies of the parameters, compute the gradient of the float64 reference."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.ranks import GradientRecorder, Rank, RankRun, relative_error, run_ranks
from tests.trainer.conftest import References
from tests.trainer.rank_worker import CPU, NO_CLIP
from tests.trainer.scenarios import ENV_NAMES, LOSSES, SCENARIOS, SEQ_LEN, Scenario, make_manifest, ordered
from trainer.checks.packing import verify_packing
from trainer.config.model import ModelConfig
from trainer.images.samples import check_image_samples
from trainer.losses.factory import make_loss
from trainer.model.attention import overlaps
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


CASES = [(division, name) for division, names in DIVISIONS.items() for name in names]
each_case = pytest.mark.parametrize(("division", "name"), CASES, ids=[f"{d.name}: {name}" for d, name in CASES])


@pytest.fixture(scope="module")
def runs(bare_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, RankRun]:
    """What the ranks wrote down, by world size."""
    sizes = sorted({division.world_size for division in DIVISIONS})
    return {
        size: run_ranks(size, bare_model_path, tmp_path_factory.mktemp(f"parallel{size}"), train_divisions)
        for size in sizes
    }


@pytest.mark.integration
@each_case
def test_gradient_is_that_of_the_reference(
    division: Division, name: str, runs: dict[int, RankRun], references: References
) -> None:
    loss, expected = references[SCENARIOS[name], 0]
    run = runs[division.world_size]
    assert run.results()[division.name][name]["loss"] == pytest.approx(loss, rel=1e-5)
    assert relative_error(run.gradients(f"{division.name}, {name}"), expected) < 1e-5


@pytest.mark.integration
@pytest.mark.parametrize("division", DIVISIONS, ids=lambda division: division.name)
def test_counts_do_not_depend_on_how_rows_are_shared(division: Division, runs: dict[int, RankRun]) -> None:
    metrics = [runs[division.world_size].results(rank)[division.name]["packed"]["metrics"] for rank in range(2)]
    plain = runs[2].results()[Division(2, dp_replicate=2).name]["packed"]["metrics"]
    for key in ("tokens/global", "loss_tokens/global", "samples/global", "entropy/all/mean", "ratio/all/max"):
        assert metrics[0][key] == pytest.approx(plain[key], rel=1e-5)
        assert metrics[1][key] == metrics[0][key]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ((0, 4), [(0, 0, 3), (3, 3, 4)]),
        ((4, 8), [(3, 4, 8)]),
        ((8, 12), [(3, 8, 9), (9, 9, 12)]),
    ],
)
def test_parts_of_a_row_see_their_segments_from_the_beginning(
    part: tuple[int, int], expected: list[tuple[int, int, int]]
) -> None:
    assert overlaps((3, 6, 3), *part) == expected
