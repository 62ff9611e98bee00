"""`CriticLearner`: the critic, the optimizer of its weights, and how they learn."""

from dataclasses import dataclass

import torch

from trainer.config import TrainerConfig
from trainer.critic.config import CriticConfig
from trainer.critic.model import Critic, load_critic, shard_critic
from trainer.distributed import Ranks
from trainer.model import Policy
from trainer.optimizer import make_optimizer


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
