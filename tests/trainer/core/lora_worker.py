"""Real ranks with a LoRA adapter: gradients by scenario, a publish and a checkpoint of each group of ranks."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import GradientRecorder, Rank
from tests.trainer.core.rank_worker import CPU, part_name, train_scenario
from tests.trainer.core.scenarios import LOSSES, SCENARIOS, SEQ_LEN
from tests.trainer.shell.tiny import save
from trainer.checkpoints.checkpoints import Checkpoints, Origin
from trainer.checkpoints.state import TrainState
from trainer.checks.packing import verify_packing
from trainer.config.model import LoraConfig, ModelConfig, OptimizerConfig
from trainer.config.trainer import CheckpointConfig
from trainer.model.fsdp import shard_policy
from trainer.model.policy import Policy, load_policy
from trainer.optimizer import make_optimizer, named_moments
from trainer.ranks import Ranks
from trainer.weights.files import FilePublisher

LORA = LoraConfig(rank=3, alpha=5)
"""A rank that neither 2 nor 4 ranks can share evenly."""
RUN_ID = "lora"
RANK_SCENARIOS = {
    name: scenario for name, scenario in SCENARIOS.items() if name not in LOSSES and not name.startswith("by ")
}
"""Every way to split a batch, and every loss (in mini-batches)."""


def load_lora_policy(model_path: Path) -> Policy:
    """A policy whose adapter changes something: with `B = 0`, as it starts, `A` would have no gradient."""
    torch.manual_seed(0)
    policy = load_policy(ModelConfig(path=model_path, seq_len=SEQ_LEN, lora=LORA), CPU)
    set_adapter(policy.causal_lm)
    return policy


def set_adapter(model: torch.nn.Module) -> None:
    """The same numbers in the same modules, however peft calls them."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]
    for seed, (_, parameter) in enumerate(sorted(trained, key=lambda item: item[0])):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        parameter.data.copy_(0.2 * values)


def make_lora_checkpoints(root: Path, policy: Policy, ranks: Ranks, model_path: Path) -> Checkpoints:
    return Checkpoints(root, Origin(RUN_ID, "digest", model_path, policy.adapter), CheckpointConfig(), ranks)


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
