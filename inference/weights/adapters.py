"""An adapter: its pairs of tensors, held against a model, merged into it, or as a folder in PEFT's format."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from inference.errors import WeightsRefused
from inference.weights.publish import VerifiedWeights, check_fits, served_tensors, tensors_digest
from transport.wire.weights import AdapterInfo

_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdapterPair(NamedTuple):
    """`lora_b @ lora_a` is what the adapter adds to a weight, but for the scale."""

    lora_a: Tensor
    lora_b: Tensor


def adapter_pairs(tensors: Mapping[str, Tensor]) -> dict[str, AdapterPair]:
    """The pairs by the name of the module. Raises `ValueError` for a tensor that is not half of one."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in tensors})
    try:
        return {module: AdapterPair(tensors[module + _A], tensors[module + _B]) for module in modules}
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from None


def check_base(weights: VerifiedWeights, adapter: AdapterInfo, digest: str) -> None:
    """Raise `WeightsRefused` unless the adapter was trained on the model with this digest."""
    if digest != adapter.base_digest:
        raise WeightsRefused(
            f"version {weights.version} is an adapter of another model: its base has digest {adapter.base_digest}, "
            f"the model of this engine {digest}; serve the trainer's model.path, as float32"
        )


def fitting_pairs(
    weights: VerifiedWeights, adapter: AdapterInfo, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, AdapterPair]:
    """The pairs, if each fits the weight of its module in `shapes`. Raises `WeightsRefused`."""
    try:
        pairs = adapter_pairs(weights.tensors)
    except ValueError as error:
        raise WeightsRefused(f"version {weights.version} is an adapter of another model: {error}") from error
    for module, pair in pairs.items():
        rows, columns = shapes.get(f"{module}.weight", (0, 0))
        found = tuple(pair.lora_b.shape), tuple(pair.lora_a.shape)
        if found != ((rows, adapter.rank), (adapter.rank, columns)):
            raise WeightsRefused(
                f"version {weights.version} is an adapter of another model: {module} has {found} for a weight of "
                f"{(rows, columns)} and rank {adapter.rank}"
            )
    return pairs


class AdapterBase:
    """The base weights of the model in service, so that adapters can be merged into it.

    Calls belong to one update at a time; decoding may go on meanwhile.

    The model computes with `W + alpha / rank * B @ A`, which costs a decode step nothing. The next adapter needs `W`
    again: a copy is kept of the tensors that adapters change, and of no others.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}

    @torch.inference_mode()
    def loadable(self, weights: VerifiedWeights) -> VerifiedWeights:
        """Weights of a whole model: `weights` themselves, or the base with the adapter merged into it.

        Raises `WeightsRefused` for those of another model, and for an adapter of another base, by the digest of the
        bytes that are here.
        """
        if weights.adapter is None:
            check_fits(self._model, weights)
            return weights
        base = dict(served_tensors(self._model)) | self._kept
        check_base(weights, weights.adapter, tensors_digest(base.items()))
        pairs = fitting_pairs(weights, weights.adapter, {name: tuple(tensor.shape) for name, tensor in base.items()})
        changed = {f"{module}.weight": pair for module, pair in pairs.items()}
        self._kept |= {name: base[name].clone() for name in changed if name not in self._kept}
        scale = weights.adapter.alpha / weights.adapter.rank
        merged = base | {name: merge_adapter(base[name], pair, scale) for name, pair in changed.items()}
        return replace(weights, tensors=merged, merged_digest=tensors_digest(merged.items()))

    def loaded(self, weights: VerifiedWeights) -> None:
        """`weights` are in the model now: a whole version is the new base."""
        if weights.adapter is None:
            self._kept = {}


def merge_adapter(weight: Tensor, pair: AdapterPair, scale: float) -> Tensor:
    """`weight + scale * B @ A`, computed in float32."""
    lora_a, lora_b = (part.to(weight.device, torch.float32) for part in pair)
    return (weight.float() + scale * (lora_b @ lora_a)).to(weight.dtype)


_PREFIX = "base_model.model."
_TENSORS = "adapter_model.safetensors"


def write_adapter_folder(folder: Path, adapter: AdapterInfo, pairs: dict[str, AdapterPair]) -> None:
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
