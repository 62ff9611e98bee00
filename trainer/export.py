"""`trainer export`: a checkpoint becomes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads.

That of an adapter becomes a folder for `PeftModel.from_pretrained`, or, merged with its base, one as above.
"""

import json
import os
import shutil
from pathlib import Path

from torch import Tensor

from runtime.atomic_write import atomic_write
from runtime.errors import UserError
from trainer.adapter import read_adapter
from trainer.adapter_export import merged_weights, write_peft_folder
from trainer.checkpoint import HF_NAME
from trainer.checkpoint_manifest import CheckpointManifest, read_manifest, verify_files
from trainer.checkpoint_state import load_weights
from trainer.errors import CheckpointInvalid
from trainer.hf_folder import copy_model_files
from trainer.local_ranges import raw_bytes, spec_of
from trainer.safetensors_layout import MAX_SHARD_BYTES, ShardLayout, plan_shards


def newest_checkpoint(root: Path) -> Path:
    """The newest whole checkpoint below `root`; `UserError` with the reasons if there is none."""
    reasons = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            check_checkpoint(folder)
            return folder
        except CheckpointInvalid as error:
            reasons.append(f"{folder.name}: {error}")
    raise UserError(f"no valid checkpoint in {root} ({'; '.join(reasons) or 'it has none'})")


def check_checkpoint(folder: Path) -> CheckpointManifest:
    """Verify every file. Raises `CheckpointInvalid`."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    return manifest


def export_checkpoint(
    folder: Path,
    out: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    merged: bool = False,
    base: Path | None = None,
) -> CheckpointManifest:
    """Write the model of a checkpoint to the new folder `out`. It appears whole or not at all.

    `merged` asks for the whole model of an adapter's checkpoint, whose base model is in `base`, or where it was.
    """
    if out.exists():
        raise UserError(f"{out} exists: choose another --out")
    try:
        manifest = check_checkpoint(folder)
    except CheckpointInvalid as error:
        raise UserError(f"{folder} is not a valid checkpoint: {error}") from error
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _write_folder(folder, staging, max_shard_bytes, merged=merged, base=base)
        os.rename(staging, out)
    except UserError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return manifest


def _write_folder(checkpoint: Path, out: Path, max_shard_bytes: int, *, merged: bool, base: Path | None) -> None:
    adapter, weights = read_adapter(checkpoint), load_weights(checkpoint)
    if merged and adapter is None:
        raise UserError(f"{checkpoint} holds a whole model, not an adapter: leave --merged out")
    copy_model_files(checkpoint / HF_NAME, out)
    if adapter is not None and not merged:
        return write_peft_folder(adapter, weights, out)
    if adapter is not None:
        weights = merged_weights(adapter, weights, base or Path(adapter.base_path))
    _write_model(weights, out, max_shard_bytes)


def _write_model(weights: dict[str, Tensor], out: Path, max_shard_bytes: int) -> None:
    _set_dtype(out / "config.json", next(iter(weights.values())))
    shards = plan_shards((spec_of(name, tensor) for name, tensor in weights.items()), max_shard_bytes)
    if len(shards) == 1:
        _write_shard(out / "model.safetensors", shards[0], weights)
        return
    for shard in shards:
        _write_shard(out / shard.file, shard, weights)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: s.file for s in shards for name in s.starts}}
    atomic_write(out / "model.safetensors.index.json", json.dumps(index, indent=2).encode())


def _write_shard(path: Path, shard: ShardLayout, weights: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        file.write(shard.head)
        for name in shard.starts:
            file.write(raw_bytes(weights[name]))


def _set_dtype(path: Path, tensor: Tensor) -> None:
    """`from_pretrained` loads in the type that config.json names: it must be the type of the weights."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(tensor.dtype).removeprefix("torch.")
    atomic_write(path, json.dumps(config, indent=2).encode())
