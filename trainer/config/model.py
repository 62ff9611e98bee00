"""Configuration of what is trained: model, adapter, critic, optimizer and schedule. Imports no torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from runtime.config.config import Config
from runtime.config.keys import Advanced


class CriticConfig(Config):
    """A value head, and advantages made from it (PPO). The orchestrator needs `advantage.type = "ppo"`."""

    trunk: Literal["own", "shared"] = "own"
    """What the value head stands on: a model of its `own`, or the policy's trunk, `shared` with it."""
    path: Advanced[Path | None] = None
    """Hugging Face folder that an `own` trunk starts from; `None`: `model.path`."""
    level: Literal["token", "step"] = "token"
    """What counts as an action: every trained token, or every turn of the policy."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount from one action to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation: 1 trusts the reward alone, 0 the critic alone."""
    clip: Advanced[float | None] = Field(0.2, gt=0)
    """Largest change of a value within a batch that still lowers the loss; `None`: no limit."""
    loss_weight: Advanced[float] = Field(0.5, gt=0)
    """Factor of the value loss. Matters on a shared trunk, where it is added to the policy's loss."""
    normalize_advantages: Advanced[bool] = True
    """Bring the advantages of a batch to mean 0 and deviation 1 over its tokens."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic's own weights; the rest is as for the policy (`optimizer`, `schedule`)."""

    @model_validator(mode="after")
    def _check_path(self) -> "CriticConfig":
        if self.trunk == "shared" and self.path is not None:
            raise ValueError("critic.path is for a trunk of its own: remove it, or set critic.trunk = 'own'")
        return self


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Config):
    """A LoRA adapter on a model that stays as it is."""

    rank: int = Field(16, gt=0)
    """Rank of the change of each weight: columns of `B` and rows of `A` in `W + alpha / rank * B @ A`."""
    alpha: int = Field(32, gt=0)
    """Scale of the change of each weight, see `rank`."""
    target_modules: Advanced[tuple[str, ...]] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their names; each must occur. The head cannot be one."""


class ModelConfig(Config):
    """The model that is trained, and how it is held and computed."""

    path: Path
    """Hugging Face folder to start from."""
    seq_len: int = Field(1024, gt=1)
    """Cap on one sample, in tokens; longer samples are cut at the end."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters in the forward pass; gradients are reduced and parameters kept in float32."""
    attention: Advanced[Literal["auto", "segment_sdpa", "torch_varlen"]] = "auto"
    """Attention kernel; `auto` takes the first that works here, any other fails at start-up if it does not work."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: much less memory, about a
    third more time."""
    compile: bool = False
    """Compile the layers with torch.compile; the first steps take minutes. For GPUs: on a CPU it works, but gains
    nothing."""
    device: str = "auto"
    """`cpu` or `cuda`; `auto` takes a GPU if there is one."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the model; off unless the table is there (it may be empty). See docs/lora.md."""


class OptimizerConfig(Config):
    """AdamW, or Muon beside it."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the layers, AdamW for the rest (embedding, head, norms, biases). One rank only,
    and not for adapters. A critic always has AdamW."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate; Muon's steps are scaled to the size of AdamW's, so one rate serves both."""
    momentum: Advanced[float] = Field(0.95, ge=0, lt=1)
    """Decay rate of Muon's momentum; no meaning for AdamW."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: Advanced[float] = Field(1e-8, gt=0)
    """Term in the denominator of AdamW that keeps the update finite."""
    weight_decay: float = Field(0.0, ge=0)
    """Share of each weight that a step takes away, times the learning rate (decoupled)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""


class ScheduleConfig(Config):
    """How the learning rate goes over the steps of the run."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; `linear` and `cosine` fall to `min_lr_ratio` at `max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises linearly from 0 to its peak."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""
