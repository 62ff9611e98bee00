"""An adapter for others: in PEFT's format, or merged into its base model."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.errors import UserError
from trainer.adapter import Adapter
from trainer.local_ranges import named_weights
from trainer.lora import base_digest, peft_config

PEFT_PREFIX = "base_model.model."
_OF_THE_BASE = ("config.json", "generation_config.json")
"""With them the folder would pass for a whole model."""


def write_peft_folder(adapter: Adapter, weights: dict[str, Tensor], out: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` for `PeftModel.from_pretrained`."""
    for name in _OF_THE_BASE:
        (out / name).unlink(missing_ok=True)
    peft_config(adapter).save_pretrained(str(out))
    named = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})


def merged_weights(adapter: Adapter, weights: dict[str, Tensor], base: Path) -> dict[str, Tensor]:
    """All weights of the base model in `base`, with the adapter in them. Raises `UserError` if it is another base."""
    if not (base / "config.json").is_file():
        raise UserError(f"the base model of the adapter is not in {base}: say where it is with --base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    if (found := base_digest(model)) != adapter.base_digest:
        raise UserError(
            f"the adapter was trained on another model than that in {base} (digest {found[:8]}, not "
            f"{adapter.base_digest[:8]}): say where the base model is with --base"
        )
    merged = named_weights(model)
    for name, lora_b in weights.items():
        if name.endswith(".lora_B.weight"):
            module = name.removesuffix(".lora_B.weight")
            change = lora_b @ weights[f"{module}.lora_A.weight"] * (adapter.alpha / adapter.rank)
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + change
    return merged
