"""`trainer export`: a checkpoint becomes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads.

That of an adapter becomes a folder for `PeftModel.from_pretrained`, or, merged with its base, one as above.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime.errors import UserError
from trainer.checkpoints.checkpoints import HF_NAME, copy_model_files
from trainer.checkpoints.manifest import CheckpointManifest, checkpoint_dir, find_newest, read_manifest, verify_files
from trainer.checkpoints.state import load_weights
from trainer.errors import CheckpointInvalid
from trainer.model.lora import base_digest, peft_config
from trainer.ranks import Ranks
from trainer.weights.adapter import Adapter, read_adapter
from trainer.weights.local_ranges import named_weights
from transport.durable import atomic_write


def newest_checkpoint(root: Path) -> Path:
    """The newest whole checkpoint below `root`, of any run; `UserError` if there is none."""
    manifest = find_newest(root, None, Ranks(0, 1, torch.device("cpu")))
    if manifest is None:
        raise UserError(f"no valid checkpoint in {root}: no save has ended")
    return checkpoint_dir(root, manifest.step)


def export_checkpoint(folder: Path, out: Path, *, merged: bool = False, base: Path | None = None) -> CheckpointManifest:
    """Write the model of a checkpoint to the new folder `out`. It appears whole or not at all.

    `merged` asks for the whole model of an adapter's checkpoint, whose base model is in `base`, or where it was.
    """
    if out.exists():
        raise UserError(f"{out} exists: choose another --out")
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest.files)
    except CheckpointInvalid as error:
        raise UserError(f"{folder} is not a valid checkpoint: {error}") from error
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _write_folder(folder, staging, merged=merged, base=base)
        os.rename(staging, out)
    except UserError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(f"cannot write {out}: {error}") from error
    return manifest


def _write_folder(checkpoint: Path, out: Path, *, merged: bool, base: Path | None) -> None:
    adapter, weights = read_adapter(checkpoint), load_weights(checkpoint)
    if merged and adapter is None:
        raise UserError(f"{checkpoint} holds a whole model, not an adapter: leave --merged out")
    copy_model_files(checkpoint / HF_NAME, out)
    if adapter is not None and not merged:
        return write_peft_folder(adapter, weights, out)
    if adapter is not None:
        weights = merged_weights(adapter, weights, base or Path(adapter.base_path))
    _set_dtype(out / "config.json", next(iter(weights.values())))
    save_torch_state_dict(weights, out)


def _set_dtype(path: Path, tensor: Tensor) -> None:
    """`from_pretrained` loads in the type that config.json names: it must be the type of the weights."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(tensor.dtype).removeprefix("torch.")
    atomic_write(path, json.dumps(config, indent=2).encode())


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
