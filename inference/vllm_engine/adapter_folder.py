"""An adapter as a folder in PEFT's format, which is how vLLM takes one. Needs no vLLM."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.torch_engine.adapter_pairs import Pair
from transport.wire.weights import AdapterInfo

_PREFIX = "base_model.model."
_TENSORS = "adapter_model.safetensors"


def write_adapter_folder(folder: Path, adapter: AdapterInfo, pairs: dict[str, Pair]) -> None:
    """Make `folder`, which must not exist."""
    folder.mkdir(parents=True)
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = pair.lora_a.contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = pair.lora_b.contiguous()
    save_file(tensors, folder / _TENSORS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in pairs}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def read_adapter_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors under the names of publishes."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / _TENSORS).items()}
