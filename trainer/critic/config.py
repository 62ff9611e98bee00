"""Configuration of the critic. Imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from runtime.config.config import Config


class CriticConfig(Config):
    """A value head, and advantages made from it (PPO). The orchestrator needs `advantage.type = "ppo"`."""

    trunk: Literal["own", "shared"] = "own"
    """What the value head stands on: a model of its `own`, or the policy's trunk, `shared` with it."""
    path: Path | None = None
    """Hugging Face folder that an `own` trunk starts from; `None`: `model.path`."""
    level: Literal["token", "step"] = "token"
    """What counts as an action: every trained token, or every turn of the policy."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount from one action to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Of GAE: 1 trusts the reward alone, 0 the critic alone."""
    clip: float | None = Field(0.2, gt=0)
    """Largest change of a value within a batch that still lowers the loss; `None`: no limit."""
    loss_weight: float = Field(0.5, gt=0)
    """Factor of the value loss. Matters on a shared trunk, where it is added to the policy's loss."""
    normalize_advantages: bool = True
    """Bring the advantages of a batch to mean 0 and deviation 1 over its tokens."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic's own weights; the rest is as for the policy (`optimizer`, `schedule`)."""

    @model_validator(mode="after")
    def _check_path(self) -> "CriticConfig":
        if self.trunk == "shared" and self.path is not None:
            raise ValueError("critic.path is for a trunk of its own: remove it, or set critic.trunk = 'own'")
        return self
