"""`BaseModel`: the weights that an adapter is merged into, and the way back to them.

The model computes with `W + alpha / rank * B @ A`, which costs a decode step nothing. The next adapter needs `W` again:
a copy is kept of the tensors that adapters change, and of no others.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.errors import WeightsRefused
from inference.torch_engine.weights import VerifiedWeights, check_fits, served_tensors, tensors_digest
from transport.weights import AdapterInfo

_A, _B = ".lora_A.weight", ".lora_B.weight"


class BaseModel:
    """Of the model in service. Calls belong to one update at a time; decoding may go on meanwhile."""

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
        self._check_base(weights, weights.adapter, base)
        changes = adapter_changes(weights, weights.adapter, base)
        self._kept |= {name: base[name].clone() for name in changes if name not in self._kept}
        merged = base | {name: (base[name].float() + change).to(base[name]) for name, change in changes.items()}
        return replace(weights, tensors=merged, merged_digest=tensors_digest(merged.items()))

    def loaded(self, weights: VerifiedWeights) -> None:
        """`weights` are in the model now: a whole version is the new base."""
        if weights.adapter is None:
            self._kept = {}

    def _check_base(self, weights: VerifiedWeights, adapter: AdapterInfo, base: dict[str, Tensor]) -> None:
        digest = tensors_digest(base.items())
        if digest != adapter.base_digest:
            raise WeightsRefused(
                f"version {weights.version} is an adapter of another model: its base has digest "
                f"{adapter.base_digest}, the model of this engine {digest}; serve the trainer's model.path, as float32"
            )


def adapter_changes(weights: VerifiedWeights, adapter: AdapterInfo, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the adapter adds to which tensor of `base`, in float32. Raises `WeightsRefused` if it does not fit."""
    changes = {}
    for module in {name.removesuffix(_A).removesuffix(_B) for name in weights.tensors}:
        name = f"{module}.weight"
        pair = weights.tensors.get(module + _B), weights.tensors.get(module + _A)
        if name not in base or pair[0] is None or pair[1] is None:
            raise WeightsRefused(f"version {weights.version} is an adapter of another model: no pair for {name}")
        rows, columns = base[name].shape
        shapes = [tuple(part.shape) for part in pair if part is not None]
        if shapes != [(rows, adapter.rank), (adapter.rank, columns)]:
            raise WeightsRefused(f"version {weights.version} is an adapter of another model: {module} has {shapes}")
        lora_b, lora_a = (part.to(base[name].device, torch.float32) for part in pair if part is not None)
        changes[name] = lora_b @ lora_a * (adapter.alpha / adapter.rank)
    return changes
