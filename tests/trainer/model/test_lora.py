"""LoRA: the adapter alone is trained, published and saved, and its gradient is that of peft in float64.

Every scenario of the invariance list on a plain process; all ways to split a batch, and all losses, on 1, 2, 4 ranks.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import GradientRecorder, Rank, RankRun, relative_error, run_ranks
from tests.trainer.conftest import samples_of
from tests.trainer.images.tiny_vlm import save_tiny_vlm
from tests.trainer.rank_worker import CPU, micro_batches_of, part_name, train_scenario
from tests.trainer.reference import load_reference, reference_loss
from tests.trainer.scenarios import LOSSES, SCENARIOS, SEQ_LEN, Scenario, save_tiny_model
from tests.trainer.step.test_gradient_invariance import each_part
from tests.trainer.tiny import save
from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.state import TrainState
from trainer.checks.packing import verify_packing
from trainer.config.model import LoraConfig, ModelConfig, OptimizerConfig
from trainer.config.trainer import CheckpointConfig, TrainerConfig
from trainer.errors import ModelUnusable
from trainer.model.fsdp import shard_policy
from trainer.model.lora import base_digest
from trainer.model.policy import Policy, load_policy
from trainer.optimizer import make_optimizer, named_moments
from trainer.ranks import Ranks
from trainer.step.report import TrainProgress
from trainer.weights.files import FilePublisher
from trainer.weights.local_ranges import named_weights
from transport.wire.weights import read_weight_manifest, version_dir

LORA = LoraConfig(rank=3, alpha=5)
"""A rank that neither 2 nor 4 ranks can share evenly."""
RUN_ID = "lora"
RANK_SCENARIOS = {
    name: scenario for name, scenario in SCENARIOS.items() if name not in LOSSES and not name.startswith("by ")
}
"""Every way to split a batch, and every loss (in mini-batches)."""


def load_lora_policy(bare_model_path: Path) -> Policy:
    """A policy whose adapter changes something: with `B = 0`, as it starts, `A` would have no gradient."""
    torch.manual_seed(0)
    policy = load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    set_adapter(policy.causal_lm)
    return policy


def set_adapter(model: torch.nn.Module) -> None:
    """The same numbers in the same modules, however peft calls them."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]
    for seed, (_, parameter) in enumerate(sorted(trained, key=lambda item: item[0])):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        parameter.data.copy_(0.2 * values)


def make_lora_checkpoints(root: Path, policy: Policy, ranks: Ranks, bare_model_path: Path) -> Checkpoints:
    return Checkpoints(root, Origin(RUN_ID, "digest", bare_model_path, policy.adapter), CheckpointConfig(), ranks)


def filled_moments(policy: Policy) -> tuple[torch.optim.AdamW, dict[str, Tensor]]:
    """An optimizer whose moments are those of one step on the square of all trained weights."""
    optimizer = make_optimizer(policy.causal_lm, OptimizerConfig(lr=1e-2))
    for parameter in policy.causal_lm.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, named_moments(policy.causal_lm, optimizer)


def train_adapter(me: Rank) -> None:
    """Train every scenario, publish and save; rank 0 leaves gradients by scenario."""
    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("dp",))
    policy = shard_policy(load_lora_policy(me.model_path), mesh, reshard_after_forward=True)
    verify_packing(policy, CPU)
    for name, scenario in RANK_SCENARIOS.items():
        for mini_batch in range(scenario.mini_batches):
            recorder = GradientRecorder(policy.causal_lm)
            train_scenario(policy, recorder, scenario, me.rank, me.world_size, mini_batch)
            if me.rank == 0:
                save_file(recorder.gradients, me.out / f"{part_name(name, mini_batch)}.safetensors")
    assert policy.adapter is not None
    ranks = Ranks(me.rank, me.world_size, CPU)
    optimizer, _ = filled_moments(policy)
    FilePublisher(me.out / "weights", RUN_ID, 2, ranks, adapter=policy.adapter.info).publish(policy.causal_lm, 1)
    checkpoints = make_lora_checkpoints(me.out / "checkpoints", policy, ranks, me.model_path)
    assert save(checkpoints, TrainState(policy.causal_lm, optimizer), step=1)


ALONE = Ranks(0, 1, CPU)


class LoraReferences:
    """Gradients by peft on a float64 model, one sample at a time, of each distinct batch once."""

    def __init__(self, bare_model_path: Path) -> None:
        config = PeftLoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.target_modules))
        self._model = get_peft_model(load_reference(bare_model_path), config).double()
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
def lora_references(bare_model_path: Path) -> LoraReferences:
    return LoraReferences(bare_model_path)


@pytest.fixture(scope="module")
def lora_policy(bare_model_path: Path) -> Policy:
    return load_lora_policy(bare_model_path)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2, 4], ids=lambda size: f"{size}ranks")
def lora_run(
    request: pytest.FixtureRequest, bare_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> RankRun:
    """All scenarios with an adapter, by this many real processes."""
    return run_ranks(request.param, bare_model_path, tmp_path_factory.mktemp(f"lora{request.param}"), train_adapter)


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
def test_ranks_publish_the_adapter_and_nothing_else(lora_run: RankRun, bare_model_path: Path) -> None:
    policy = load_lora_policy(bare_model_path)
    filled_moments(policy)
    manifest = read_weight_manifest(version_dir(lora_run.out / "weights", 1) / "manifest.json")
    assert {entry.name: entry.shape for entry in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in named_weights(policy.causal_lm).items()
    }
    assert manifest.adapter is not None
    assert (manifest.adapter.rank, manifest.adapter.alpha) == (LORA.rank, LORA.alpha)
    assert manifest.adapter.base_digest == base_digest(
        load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN), CPU).causal_lm
    )


@pytest.mark.integration
def test_checkpoint_of_ranks_resumes_exactly_in_a_plain_process(lora_run: RankRun, bare_model_path: Path) -> None:
    expected = load_lora_policy(bare_model_path)
    _, moments = filled_moments(expected)
    torch.manual_seed(9)
    policy = load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    optimizer = make_optimizer(policy.causal_lm, OptimizerConfig(lr=1e-2))
    checkpoints = make_lora_checkpoints(lora_run.out / "checkpoints", policy, ALONE, bare_model_path)
    assert checkpoints.resume(TrainState(policy.causal_lm, optimizer)) == TrainProgress(step=1)
    for name, tensor in named_weights(policy.causal_lm).items():
        assert torch.equal(tensor, named_weights(expected.causal_lm)[name]), name
    for name, tensor in named_moments(policy.causal_lm, optimizer).items():
        assert torch.equal(tensor, moments[name]), name


def test_only_the_adapter_is_trained_and_a_step_changes_it(bare_model_path: Path) -> None:
    policy = load_lora_policy(bare_model_path)
    before = {name: parameter.detach().clone() for name, parameter in policy.causal_lm.named_parameters()}
    train_scenario(policy, make_optimizer(policy.causal_lm, OptimizerConfig(lr=1e-2)), SCENARIOS["packed"], 0, 1)
    changed = {
        name for name, parameter in policy.causal_lm.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}


def test_new_adapter_changes_nothing(bare_model_path: Path, policy: Policy) -> None:
    fresh = load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    with torch.no_grad():
        assert torch.equal(_forward(fresh), _forward(policy))


@pytest.mark.parametrize(
    ("target", "reason"),
    [("lm_head", "is the head"), ("no_such_proj", "has no module"), ("embed_tokens", "not a linear layer")],
)
def test_module_that_cannot_have_an_adapter_is_refused(bare_model_path: Path, target: str, reason: str) -> None:
    lora = LoraConfig(target_modules=("q_proj", target))
    with pytest.raises(ModelUnusable, match=reason):
        load_policy(ModelConfig(path=bare_model_path, seq_len=SEQ_LEN, lora=lora), CPU)


def test_model_with_other_parts_than_text_is_refused(tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=("q_proj",))
    with pytest.raises(ModelUnusable, match=r"model\.lora is for text models"):
        load_policy(ModelConfig(path=save_tiny_vlm(tmp_path, "qwen3_vl"), seq_len=SEQ_LEN, lora=lora), CPU)


def test_critic_and_adapter_exclude_each_other(bare_model_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"model\.lora and critic exclude each other"):
        TrainerConfig.model_validate({"model": {"path": str(bare_model_path), "lora": {}}, "critic": {}})


def test_base_digest_sees_a_change_of_a_single_weight(tmp_path: Path) -> None:
    first = load_policy(ModelConfig(path=save_tiny_model(tmp_path), seq_len=SEQ_LEN), CPU).causal_lm
    digest = base_digest(first)
    with torch.no_grad():
        first.model.norm.weight[0] += 1e-6
    assert base_digest(first) != digest


def _forward(policy: Policy) -> Tensor:
    return torch.cat([policy(batch).logprobs for batch in micro_batches_of(SCENARIOS["packed"], 0, 1)])
