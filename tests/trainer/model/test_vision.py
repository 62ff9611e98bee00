"""Packed rows with images: log probabilities and gradients are those of every sample alone, on one rank and on two."""

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.images.tiny_vlm import MIXED, SEQ_LEN, SPEC, draw, draw_all, relative_error, save_tiny_text
from tests.trainer.model.conftest import ImageRankRun, ImageReferences, Policies
from tests.trainer.model.image_ranks import FAMILIES, ROUNDED, SCENARIOS, ImageScenario, LogprobsByRow, plan_of, train
from tests.trainer.rank_worker import CPU
from trainer.checks.packing import verify_packing
from trainer.config.model import ModelConfig
from trainer.errors import ModelUnusable
from trainer.model.context_parallel import ContextParallel
from trainer.model.policy import Policy, load_policy
from trainer.planning.pack import pack
from transport.wire.weights import version_dir

TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 1e-4


def reference_tolerance(family: str, name: str) -> float:
    """Of float32 gradients against those of the model's own forward in float64."""
    return ROUNDED_TOLERANCE if (family, name) in ROUNDED else TOLERANCE


def scores(policy: Policy, *drawings: str) -> Tensor:
    samples = draw_all(*drawings)
    with torch.no_grad():
        batch = pack(samples, [0] * len(samples), range(len(samples)), images=SPEC)
        return policy(batch).logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probabilities_are_those_of_the_models_own_forward(
    family: str, policies: Policies, image_references: ImageReferences
) -> None:
    expected, _ = image_references[family, ImageScenario(MIXED)]
    torch.testing.assert_close(scores(policies[family], *MIXED).double(), torch.cat(expected), rtol=0, atol=TOLERANCE)


def assert_scored_alike(rows: dict[int, list[float]], scenario: ImageScenario, expected: list[Tensor]) -> None:
    """Every sound sample once, with the log probabilities of the reference."""
    assert sorted(rows) == [row for row in range(len(scenario.drawings)) if row not in scenario.spoiled]
    for row, reference in zip(sorted(rows), expected, strict=True):
        torch.testing.assert_close(torch.tensor(rows[row]).double(), reference, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scores_and_gradient_on_one_rank_are_those_of_samples_alone(
    family: str, name: str, policies: Policies, image_references: ImageReferences
) -> None:
    logprobs, (expected, expected_gradients) = LogprobsByRow(), image_references[family, SCENARIOS[name]]
    _, gradients = train(policies[family], SCENARIOS[name], rank=0, world_size=1, watch=logprobs)
    assert relative_error(gradients, expected_gradients) < reference_tolerance(family, name)
    assert_scored_alike(logprobs.rows, SCENARIOS[name], expected)


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scores_and_gradient_on_two_ranks_are_those_of_samples_alone(
    family: str, name: str, two_ranks: ImageRankRun, image_references: ImageReferences
) -> None:
    expected, expected_gradients = image_references[family, SCENARIOS[name]]
    gradients = two_ranks.gradients(f"{family} {name}")
    assert relative_error(gradients, expected_gradients) < reference_tolerance(family, name)
    assert_scored_alike(two_ranks.logprobs(family, name), SCENARIOS[name], expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_images_of_neighbours_touch_on_every_rank_where_a_scenario_says_so(world_size: int) -> None:
    plan = plan_of(SCENARIOS["images touch"], 0, world_size).mini_batches[0]
    assert plan.num_rounds * world_size == 2
    rows = [plan.micro_batch_rows(rank, index) for rank in range(world_size) for index in range(plan.num_rounds)]
    assert all(len(chosen) == 2 for chosen in rows)


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_images_give_the_vision_tower_a_gradient_of_zero(family: str, two_ranks: ImageRankRun) -> None:
    """The plan counts on an image that its rank then refuses: all ranks run the vision tower on dummies."""
    name = "the only images are refused"
    gradients = two_ranks.gradients(f"{family} {name}")
    seeing = [gradient for key, gradient in gradients.items() if key.startswith("model.visual.")]
    assert len(seeing) == sum(key.startswith("model.visual.") for key in two_ranks.gradients(f"{family} mixed"))
    assert not any(gradient.any() for gradient in seeing)


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_ranks_come_near_the_reference(
    family: str, two_ranks: ImageRankRun, image_references: ImageReferences
) -> None:
    error = relative_error(two_ranks.gradients(f"{family} bfloat16"), image_references[family, SCENARIOS["mixed"]][1])
    assert TOLERANCE < error < 0.2


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_counted_where_they_are_trained_and_dummies_nowhere(family: str, two_ranks: ImageRankRun) -> None:
    name = "images on one rank only"
    metrics = [two_ranks.metrics(family, name, rank) for rank in range(2)]
    assert sorted(local["images/local"] for local in metrics) == [0, 1]
    assert sorted(local["image_tokens/local"] for local in metrics) == [0, 4]
    assert metrics[0]["image_patches/global"] == metrics[1]["image_patches/global"] == 16
    assert metrics[0]["tokens/global"] == sum(sample.num_tokens for sample in SCENARIOS[name].samples())
    assert not [key for key in two_ranks.metrics(family, "text only") if key.startswith("image")]


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_weights_are_published_whole(family: str, two_ranks: ImageRankRun, policies: Policies) -> None:
    (file,) = version_dir(two_ranks.out / family, 0).glob("*.safetensors")
    published = load_file(file)
    assert {name for name in published if name.startswith("model.visual.blocks.")}
    for name, weight in policies[family].causal_lm.named_parameters():
        assert torch.equal(published[name], weight.detach()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_start_up_check_passes_and_leaves_no_gradient(family: str, policies: Policies) -> None:
    verify_packing(policies[family], CPU)
    assert all(weight.grad is None for weight in policies[family].parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_reach_the_tokens_behind_them_and_no_other_sample(family: str, policies: Policies) -> None:
    first, second = draw("..b..xxx"), draw(".....xxxx", index=1)
    other = draw("..b..xxx", mm_kwargs=draw("..b..xxx", seed=5).mm_kwargs)
    rows = [pack([sample, second], [0, 0], [0, 1], images=SPEC) for sample in (first, other)]
    with torch.no_grad():
        before, after = (policies[family](row).logprobs for row in rows)
    assert (before[:3] != after[:3]).all()
    assert torch.equal(before[3:], after[3:])


@pytest.mark.parametrize(("family", "name"), ROUNDED)
def test_what_float32_rounds_is_exact_in_double_precision(
    family: str, name: str, model_paths: dict[str, Path], image_references: ImageReferences
) -> None:
    policy = load_policy(ModelConfig(path=model_paths[family], seq_len=SEQ_LEN), CPU).double()
    _, gradients = train(policy, SCENARIOS[name], rank=0, world_size=1)
    assert relative_error(gradients, image_references[family, SCENARIOS[name]][1]) < TOLERANCE


@pytest.mark.integration
@pytest.mark.parametrize(("family", "name"), ROUNDED)
def test_what_float32_rounds_is_exact_in_double_precision_on_two_ranks(
    family: str, name: str, two_ranks: ImageRankRun, image_references: ImageReferences
) -> None:
    gradients = two_ranks.gradients(f"{family} {name} float64")
    assert relative_error(gradients, image_references[family, SCENARIOS[name]][1]) < TOLERANCE


def test_qwen3_5_would_leak_without_our_layer(model_paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `SegmentDeltaNet` is there; when this fails, transformers may do as well without it."""
    monkeypatch.setattr("trainer.model.policy.separate_samples", lambda model: 1)
    policy = load_policy(ModelConfig(path=model_paths["qwen3_5"], seq_len=SEQ_LEN), CPU)
    with pytest.raises(ModelUnusable, match="cannot be trained packed"):
        verify_packing(policy, CPU)


def test_a_qwen3_5_of_text_trains_packed_and_not_with_context_parallelism(tmp_path: Path) -> None:
    save_tiny_text(tmp_path)
    config = ModelConfig(path=tmp_path, seq_len=SEQ_LEN)
    verify_packing(load_policy(config, CPU), CPU)
    with pytest.raises(ModelUnusable, match=r"cannot be trained with parallel\.cp: its linear attention"):
        load_policy(config, CPU, cast(ContextParallel, object()))
