"""`BaseModel`: the weights that an adapter is merged into, and the way back to them.

The model computes with `W + alpha / rank * B @ A`, which costs a decode step nothing. The next adapter needs `W` again:
a copy is kept of the tensors that adapters change, and of no others.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.torch_engine.adapter_pairs import Pair, check_base, fitting_pairs
from inference.torch_engine.weights import VerifiedWeights, check_fits, served_tensors, tensors_digest


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
        check_base(weights, weights.adapter, tensors_digest(base.items()))
        pairs = fitting_pairs(weights, weights.adapter, {name: tuple(tensor.shape) for name, tensor in base.items()})
        changed = {f"{module}.weight": pair for module, pair in pairs.items()}
        self._kept |= {name: base[name].clone() for name in changed if name not in self._kept}
        scale = weights.adapter.alpha / weights.adapter.rank
        merged = base | {name: merge(base[name], pair, scale) for name, pair in changed.items()}
        return replace(weights, tensors=merged, merged_digest=tensors_digest(merged.items()))

    def loaded(self, weights: VerifiedWeights) -> None:
        """`weights` are in the model now: a whole version is the new base."""
        if weights.adapter is None:
            self._kept = {}


def merge(weight: Tensor, pair: Pair, scale: float) -> Tensor:
    """`weight + scale * B @ A`, computed in float32."""
    lora_a, lora_b = (part.to(weight.device, torch.float32) for part in pair)
    return (weight.float() + scale * (lora_b @ lora_a)).to(weight.dtype)
