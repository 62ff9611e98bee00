"""LoRA: the adapter alone is trained, published and saved, and its gradient is that of peft in float64.

Every scenario of the invariance list on a plain process; all ways to split a batch, and all losses, on 1, 2, 4 ranks.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from pydantic import ValidationError
from torch import Tensor

from tests.support.ranks import GradientRecorder, RankRun, relative_error, run_ranks
from tests.trainer.core.conftest import samples_of
from tests.trainer.core.lora_worker import (
    LORA,
    RANK_SCENARIOS,
    filled_moments,
    load_lora_policy,
    make_lora_checkpoints,
    set_adapter,
    train_adapter,
)
from tests.trainer.core.rank_worker import CPU, micro_batches_of, part_name, train_scenario
from tests.trainer.core.reference import load_reference, reference_loss
from tests.trainer.core.scenarios import SCENARIOS, SEQ_LEN, Scenario
from tests.trainer.core.test_gradient_invariance import each_part
from tests.trainer.core.tiny import save_tiny_model
from tests.trainer.images.tiny_vlm import save_tiny_vlm
from trainer.checkpoints.state import TrainState
from trainer.config.model import LoraConfig, ModelConfig, OptimizerConfig
from trainer.config.trainer import TrainerConfig
from trainer.errors import ModelUnusable
from trainer.model.lora import base_digest
from trainer.model.policy import Policy, load_policy
from trainer.optimizer import make_optimizer, named_moments
from trainer.ranks import Ranks
from trainer.step.report import TrainProgress
from trainer.weights.local_ranges import named_weights
from transport.wire.weights import read_weight_manifest, version_dir

ALONE = Ranks(0, 1, CPU)


class LoraReferences:
    """Gradients by peft on a float64 model, one sample at a time, of each distinct batch once."""

    def __init__(self, model_path: Path) -> None:
        config = PeftLoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.target_modules))
        self._model = get_peft_model(load_reference(model_path), config).double()
        set_adapter(self._model)
        self._known: dict[object, dict[str, Tensor]] = {}

    def __getitem__(self, part: tuple[Scenario, int]) -> dict[str, Tensor]:
        scenario, mini_batch = part
        key = scenario.batch, scenario.loss, scenario.weighting, scenario.mini_batches, mini_batch
        if key not in self._known:
            samples = samples_of(scenario, mini_batch)
            self._model.zero_grad()
            reference_loss(self._model, samples, SEQ_LEN, scenario.loss, scenario.weighting).backward()
            self._known[key] = {
                name.removeprefix("base_model.model."): parameter.grad.clone()
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None
            }
        return self._known[key]


@pytest.fixture(scope="module")
def lora_references(model_path: Path) -> LoraReferences:
    return LoraReferences(model_path)


@pytest.fixture(scope="module")
def lora_policy(model_path: Path) -> Policy:
    return load_lora_policy(model_path)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2, 4], ids=lambda size: f"{size}ranks")
def lora_run(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RankRun:
    """All scenarios with an adapter, by this many real processes."""
    return run_ranks(request.param, model_path, tmp_path_factory.mktemp(f"lora{request.param}"), train_adapter)


@each_part
def test_plain_process_has_the_gradient_of_peft(
    name: str, mini_batch: int, lora_policy: Policy, lora_references: LoraReferences
) -> None:
    recorder = GradientRecorder(lora_policy.causal_lm)
    train_scenario(lora_policy, recorder, SCENARIOS[name], 0, 1, mini_batch)
    assert relative_error(recorder.gradients, lora_references[SCENARIOS[name], mini_batch]) < 1e-5


@pytest.mark.integration
def test_ranks_have_the_gradient_of_peft_in_every_scenario(lora_run: RankRun, lora_references: LoraReferences) -> None:
    for name, scenario in RANK_SCENARIOS.items():
        for mini_batch in range(scenario.mini_batches):
            error = relative_error(
                lora_run.gradients(part_name(name, mini_batch)), lora_references[scenario, mini_batch]
            )
            assert error < 1e-5, name


@pytest.mark.integration
def test_ranks_publish_the_adapter_and_nothing_else(lora_run: RankRun, model_path: Path) -> None:
    policy = load_lora_policy(model_path)
    filled_moments(policy)
    manifest = read_weight_manifest(version_dir(lora_run.out / "weights", 1) / "manifest.json")
    assert {entry.name: entry.shape for entry in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in named_weights(policy.causal_lm).items()
    }
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.alpha) == (LORA.rank, LORA.alpha)
    assert manifest.adapter.base_digest == base_digest(
        load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN), CPU).causal_lm
    )


@pytest.mark.integration
def test_checkpoint_of_ranks_resumes_exactly_in_a_plain_process(lora_run: RankRun, model_path: Path) -> None:
    expected = load_lora_policy(model_path)
    _, moments = filled_moments(expected)
    torch.manual_seed(9)
    policy = load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    optimizer = make_optimizer(policy.causal_lm, OptimizerConfig(lr=1e-2))
    checkpoints = make_lora_checkpoints(lora_run.out / "checkpoints", policy, ALONE, model_path)
    assert checkpoints.resume(TrainState(policy.causal_lm, optimizer)) == TrainProgress(step=1)
    for name, tensor in named_weights(policy.causal_lm).items():
        assert torch.equal(tensor, named_weights(expected.causal_lm)[name]), name
    for name, tensor in named_moments(policy.causal_lm, optimizer).items():
        assert torch.equal(tensor, moments[name]), name


def test_only_the_adapter_is_trained_and_a_step_changes_it(model_path: Path) -> None:
    policy = load_lora_policy(model_path)
    before = {name: parameter.detach().clone() for name, parameter in policy.causal_lm.named_parameters()}
    train_scenario(policy, make_optimizer(policy.causal_lm, OptimizerConfig(lr=1e-2)), SCENARIOS["packed"], 0, 1)
    changed = {
        name for name, parameter in policy.causal_lm.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}


def test_new_adapter_changes_nothing(model_path: Path, policy: Policy) -> None:
    fresh = load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    with torch.no_grad():
        assert torch.equal(_forward(fresh), _forward(policy))


@pytest.mark.parametrize(
    ("target", "reason"),
    [("lm_head", "is the head"), ("no_such_proj", "has no module"), ("embed_tokens", "not a linear layer")],
)
def test_module_that_cannot_have_an_adapter_is_refused(model_path: Path, target: str, reason: str) -> None:
    lora = LoraConfig(target_modules=("q_proj", target))
    with pytest.raises(ModelUnusable, match=reason):
        load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN, lora=lora), CPU)


def test_model_with_other_parts_than_text_is_refused(tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=("q_proj",))
    with pytest.raises(ModelUnusable, match=r"model\.lora is for text models"):
        load_policy(ModelConfig(path=save_tiny_vlm(tmp_path, "qwen3_vl"), seq_len=SEQ_LEN, lora=lora), CPU)


def test_critic_and_adapter_exclude_each_other(model_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"model\.lora and critic exclude each other"):
        TrainerConfig.model_validate({"model": {"path": str(model_path), "lora": {}}, "critic": {}})


def test_base_digest_sees_a_change_of_a_single_weight(tmp_path: Path) -> None:
    first = load_policy(ModelConfig(path=save_tiny_model(tmp_path), seq_len=SEQ_LEN), CPU).causal_lm
    digest = base_digest(first)
    with torch.no_grad():
        first.model.norm.weight[0] += 1e-6
    assert base_digest(first) != digest


def _forward(policy: Policy) -> Tensor:
    return torch.cat([policy(batch).logprobs for batch in micro_batches_of(SCENARIOS["packed"], 0, 1)])
