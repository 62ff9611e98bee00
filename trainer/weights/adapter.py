"""`Adapter`: what a LoRA adapter is besides its tensors, and the names under which those are saved and published.

A tensor is called like the module it changes: `model.layers.0.self_attn.q_proj.lora_A.weight`. That is the name of
peft's parameter without the name that peft gives the adapter, and the name in PEFT's files without their prefix.
"""

from pathlib import Path

import msgspec

from runtime.errors import UserError
from transport.wire.weights import AdapterInfo

ADAPTER_FILE = "adapter.json"
PEFT_NAME = "default"
"""peft's name for the only adapter of a model."""
_ENDINGS = {f".lora_{part}.{PEFT_NAME}.weight": f".lora_{part}.weight" for part in "AB"}


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One adapter and the model that it belongs to."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    base_path: str
    """Folder of the base model when the run began."""
    base_digest: str
    """Digest of all weights of the base model, in float32."""

    @property
    def info(self) -> AdapterInfo:
        """The part that a publish tells engines."""
        return AdapterInfo(rank=self.rank, alpha=self.alpha, base_digest=self.base_digest)


def adapter_tensor_name(parameter: str) -> str | None:
    """Our name of peft's `parameter`; `None` for one of the base model."""
    for ending, ours in _ENDINGS.items():
        if parameter.endswith(ending):
            return parameter.removesuffix(ending) + ours
    return None


def read_adapter(checkpoint: Path) -> Adapter | None:
    """The adapter that a (verified) checkpoint holds; `None`: it holds a whole model."""
    path = checkpoint / ADAPTER_FILE
    return msgspec.json.decode(path.read_bytes(), type=Adapter) if path.exists() else None


def check_same_adapter(checkpoint: Path, saved: Adapter | None, ours: Adapter | None) -> None:
    """Raise `UserError` unless a checkpoint with `saved` can go on as `ours`: same shapes, same base model."""
    if (saved is None) != (ours is None):
        holds, asked = ("a whole model", "an adapter") if saved is None else ("an adapter", "a whole model")
        raise UserError(
            f"{checkpoint} holds {holds} and the config trains {asked}: set model.lora as the run began, "
            "or choose another --run.name"
        )
    if saved is None or ours is None:
        return
    for key in ("rank", "alpha", "target_modules", "base_digest"):
        then, now = getattr(saved, key), getattr(ours, key)
        if then != now:
            raise UserError(
                f"{checkpoint} holds an adapter with {key} {then}, this run has {now}: use the model and the "
                "model.lora that the run began with, or choose another --run.name"
            )
