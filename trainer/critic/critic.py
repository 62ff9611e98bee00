"""`Critic`: the value of the state before each trained token, from a trunk of its own or from the policy's.

Values start at 0: the head's weights do. The head computes in float32 whatever the trunk does, because a target that
moves in steps of a bfloat16 would be noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from trainer.checks.packing import verify_packing
from trainer.config.model import CriticConfig, ModelConfig
from trainer.config.trainer import TrainerConfig
from trainer.errors import ModelUnusable
from trainer.model.fsdp import decoder_layers, shard
from trainer.model.logprobs import TokenScores
from trainer.model.policy import Policy, load_policy, trunk_states
from trainer.model.vision import ImageModel
from trainer.optimizer import make_optimizer
from trainer.planning.pack import MicroBatch
from trainer.ranks import Ranks

ValueLoss = Callable[[Tensor], Tensor]
"""From the values of a micro batch to its share of the value loss."""


class Critic(nn.Module, ABC):
    """Its parameters are those that the critic's optimizer trains."""

    @abstractmethod
    def estimate(self, policy: Policy, batch: MicroBatch) -> Tensor:
        """float32[L]: values of the states before the trained tokens."""

    @abstractmethod
    def backward(self, policy_loss: Tensor, value_loss: ValueLoss, batch: MicroBatch, scores: TokenScores) -> None:
        """Add the gradients of both losses. `scores` are those that `policy_loss` was made from."""


class OwnCritic(Critic):
    """A second model. Its backward pass follows the policy's, so that the activations of both never live together."""

    def __init__(self, trunk: PreTrainedModel, compute_dtype: torch.dtype, images: ImageModel | None) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = _value_head(trunk)
        self.compute_dtype = compute_dtype
        self.images = images

    def forward(self, batch: MicroBatch) -> Tensor:
        """Values of the states before the trained tokens, in row order."""
        hidden = trunk_states(self, self.trunk, batch, self.compute_dtype, self.images)
        return _values(self.value_head, hidden[batch.loss_tokens.index - 1])

    def estimate(self, policy: Policy, batch: MicroBatch) -> Tensor:
        """Runs the critic's own trunk; the policy is not needed."""
        values: Tensor = self(batch)
        return values

    def backward(self, policy_loss: Tensor, value_loss: ValueLoss, batch: MicroBatch, scores: TokenScores) -> None:
        """Backward through the policy, then through the critic."""
        policy_loss.backward()  # type: ignore[no-untyped-call]
        value_loss(self(batch)).backward()  # type: ignore[no-untyped-call]


class SharedCritic(Critic):
    """A head on the policy's trunk, which both losses train."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.value_head = _value_head(trunk)

    def forward(self, states: Tensor) -> Tensor:
        """Values of hidden states [L, H]."""
        return _values(self.value_head, states)

    def estimate(self, policy: Policy, batch: MicroBatch) -> Tensor:
        """Runs the policy for its trunk."""
        return self._of(policy(batch))

    def backward(self, policy_loss: Tensor, value_loss: ValueLoss, batch: MicroBatch, scores: TokenScores) -> None:
        """One backward pass of both losses through the shared trunk."""
        (policy_loss + value_loss(self._of(scores))).backward()  # type: ignore[no-untyped-call]

    def _of(self, scores: TokenScores) -> Tensor:
        assert scores.states is not None, "the policy must return the states that it scored"
        values: Tensor = self(scores.states)
        return values


def load_critic(config: CriticConfig, model: ModelConfig, policy: Policy, device: torch.device) -> Critic:
    """The critic of `config` beside `policy`, on `device`. Raises `ModelUnusable` with the reason."""
    if config.trunk == "shared":
        return SharedCritic(policy.causal_lm).to(device)
    own = load_policy(model.model_copy(update={"path": config.path or model.path, "lora": None}), device)
    if config.path is not None:
        _check_suits(own, policy)
        verify_packing(own, device)
    return OwnCritic(own.causal_lm.base_model, own.compute_dtype, own.images).to(device)


def shard_critic(critic: Critic, mesh: DeviceMesh | None, *, reshard_after_forward: bool) -> Critic:
    """Shard in place over `mesh`, as the policy is. `None`: a single plain process, nothing to do."""
    if mesh is None:
        return critic
    if isinstance(critic, OwnCritic):
        shard(critic.value_head, (), mesh, torch.float32)
        layers = decoder_layers(critic.trunk)
        shard(critic, layers, mesh, critic.compute_dtype, reshard_after_forward=reshard_after_forward)
    else:
        shard(critic, (), mesh, torch.float32)
    return critic


def _check_suits(own: Policy, policy: Policy) -> None:
    known, needed = (each.causal_lm.config.get_text_config().vocab_size for each in (own, policy))
    if known < needed:
        raise ModelUnusable(f"the model of critic.path knows {known} tokens, the policy {needed}")
    if own.images != policy.images:  # it would take image tokens for text, or mix the samples of a row
        raise ModelUnusable(
            "the model of critic.path does not see images as the policy does: both must be of one family, with the "
            "same image token and patches"
        )


def _value_head(trunk: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(trunk.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _values(head: nn.Module, states: Tensor) -> Tensor:
    with torch.autocast(states.device.type, enabled=False):
        values: Tensor = head(states.float())
    return values[:, 0].clone()  # FSDP hooks the outputs of a module and cannot follow views


@dataclass(frozen=True)
class CriticLearner:
    """On a shared trunk the policy's optimizer trains the trunk, and this one the value head alone."""

    critic: Critic
    optimizer: torch.optim.Optimizer
    config: CriticConfig
    max_grad_norm: float


def make_critic(config: TrainerConfig, policy: Policy, ranks: Ranks) -> CriticLearner | None:
    """The critic that `config` asks for, sharded as the policy is. Collective."""
    if config.critic is None:
        return None
    critic = load_critic(config.critic, config.model, policy, ranks.device)
    shard_critic(
        critic, ranks.mesh(config.parallel.dp_replicate), reshard_after_forward=config.parallel.reshard_after_forward
    )
    optimizer = make_optimizer(critic, config.optimizer.model_copy(update={"type": "adamw", "lr": config.critic.lr}))
    return CriticLearner(critic, optimizer, config.critic, config.optimizer.max_grad_norm)
