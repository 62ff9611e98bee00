"""Planning with images: who shares a micro batch, and rounds in which all ranks run the vision tower."""

import numpy as np
import pytest

from trainer.planning.layout import Layout, RowSharing
from trainer.planning.plan import MiniBatchPlan, plan_step
from transport.wire.codec import batch_digest
from transport.wire.manifest import IMAGE, SCHEMA_VERSION, BatchManifest, SampleColumns
from transport.wire.tensor import EncodedTensor

CAP = 64


def manifest_of(lengths: list[int], has_image: list[bool]) -> BatchManifest:
    def int32(values: object) -> EncodedTensor:
        return EncodedTensor.of(np.asarray(values, dtype=np.int32))

    rows = np.arange(len(lengths))
    hashes = EncodedTensor.of(rows.astype(np.uint64))
    columns = SampleColumns(
        lengths=int32(lengths),
        loss_tokens=int32(np.asarray(lengths) // 2),
        env_ids=int32(rows * 0),
        groups=int32(rows * 0),
        trajectories=int32(rows),
        modalities=EncodedTensor.of(np.where(has_image, IMAGE, 0).astype(np.uint8)),
        num_bytes=EncodedTensor.of(np.ones(len(rows), dtype=np.int64)),
        oldest_versions=int32(rows * 0),
        frame_hashes=hashes,
    )
    return BatchManifest(
        schema_version=SCHEMA_VERSION,
        run_id="test",
        step=1,
        digest=batch_digest(hashes),
        env_names=("env",),
        columns=columns,
    )


def random_batch(seed: int, share: float = 0.4) -> tuple[list[int], list[bool]]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    return rng.integers(2, CAP + 1, size).tolist(), (rng.random(size) < share).tolist()


def plan_of(lengths: list[int], has_image: list[bool], num_ranks: int, sharing: RowSharing) -> MiniBatchPlan:
    plan = plan_step(manifest_of(lengths, has_image), Layout(0, num_ranks, CAP, CAP, sharing=sharing))
    return plan.mini_batches[0]


def bins(plan: MiniBatchPlan, round_index: int) -> list[list[int]]:
    return [plan.micro_batch_rows(rank, round_index).tolist() for rank in range(plan.num_ranks)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("sharing", [RowSharing.ALL, RowSharing.MODALITY])
def test_every_row_is_planned_once_under_the_cap_and_image_rounds_are_those_with_images(
    seed: int, num_ranks: int, sharing: RowSharing
) -> None:
    lengths, has_image = random_batch(seed)
    plan = plan_of(lengths, has_image, num_ranks, sharing)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    for round_index in range(plan.num_rounds):
        chosen = bins(plan, round_index)
        assert all(sum(lengths[row] for row in rows) <= CAP for rows in chosen)
        assert plan.image_rounds[round_index] == any(has_image[row] for rows in chosen for row in rows)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_at_most_one_round_needs_dummy_images_beside_real_text(seed: int, num_ranks: int) -> None:
    plan = plan_of(*random_batch(seed), num_ranks, RowSharing.ALL)
    has_image = random_batch(seed)[1]
    num_mixed = 0
    for round_index in range(plan.num_rounds):
        kinds = {any(has_image[row] for row in rows) for rows in bins(plan, round_index) if rows}
        num_mixed += len(kinds) == 2
    assert num_mixed <= 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_modalities_apart_means_pure_rounds(seed: int, num_ranks: int) -> None:
    lengths, has_image = random_batch(seed)
    plan = plan_of(lengths, has_image, num_ranks, RowSharing.MODALITY)
    for round_index in range(plan.num_rounds):
        assert len({has_image[row] for rows in bins(plan, round_index) for row in rows}) == 1


def test_text_and_images_share_a_micro_batch_only_when_asked_to() -> None:
    lengths, has_image = [20, 20, 20], [True, False, True]
    assert plan_of(lengths, has_image, 1, RowSharing.ALL).num_rounds == 1
    assert plan_of(lengths, has_image, 1, RowSharing.MODALITY).num_rounds == 2


def test_images_change_the_digest_of_a_plan() -> None:
    layout = Layout(0, 2, CAP, CAP, sharing=RowSharing.ALL)
    plans = [plan_step(manifest_of([10, 10], [first, False]), layout) for first in (True, False)]
    assert plans[0].digest != plans[1].digest
