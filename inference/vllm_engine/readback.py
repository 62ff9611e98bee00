"""Proof that the model holds the tensors it was given, as far as vLLM lets one look.

Parameters are compared byte by byte. On a CPU vLLM packs the matrices of linear layers into a form that cannot be read
back and empties the parameter; those are probed: a fixed input goes through the layer, and the output must be that of
the matrix that was given, up to rounding. This finds a layer that kept its old weights (a tied head does, B.2 of the
facts), unless both differ by less than rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.errors import WeightsNotHeld

NUM_PROBES = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of the largest output."""
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Readback:
    """How many tensors were compared, and how; `unknown` are those that this worker holds only a part of."""

    equal: int
    probed: int
    unknown: int


def read_back(model: nn.Module, tensors: dict[str, Tensor], packed: dict[str, list[str]]) -> Readback:
    """Compare every tensor with what the model holds; `packed` is vLLM's `packed_modules_mapping`.

    Raises `WeightsNotHeld`, naming the tensor.
    """
    modules = dict(model.named_modules())
    found = {"equal": 0, "probed": 0, "unknown": 0}
    for name, tensor in _with_tied_head(fuse(tensors, packed), modules).items():
        module_name, _, leaf = name.rpartition(".")
        found[_compare(name, modules.get(module_name), leaf, tensor)] += 1
    return Readback(**found)


def fuse(tensors: dict[str, Tensor], packed: dict[str, list[str]]) -> dict[str, Tensor]:
    """`q_proj`, `k_proj` and `v_proj` become `qkv_proj`, and so on: the names and shapes of vLLM's own modules."""
    fused: dict[str, Tensor] = {}
    home = {part: (whole, parts) for whole, parts in packed.items() if len(parts) > 1 for part in parts}
    for name, tensor in tensors.items():
        module_name, _, leaf = name.rpartition(".")
        parent, _, last = module_name.rpartition(".")
        if last not in home:
            fused[name] = tensor
            continue
        whole, parts = home[last]
        siblings = [tensors.get(f"{parent}.{part}.{leaf}") for part in parts]
        if last == parts[0] and all(sibling is not None for sibling in siblings):
            fused[f"{parent}.{whole}.{leaf}"] = torch.cat([sibling for sibling in siblings if sibling is not None])
    return fused


def _with_tied_head(tensors: dict[str, Tensor], modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """`tensors` with the embedding as the head's too, where the head has none of its own."""
    embedding = next((name for name in tensors if name.endswith(_EMBEDDING)), None)
    if embedding is None:
        return tensors
    head = embedding.removesuffix(_EMBEDDING) + "lm_head"  # of a vision model both are below `language_model`
    if head not in modules or f"{head}.weight" in tensors:
        return tensors
    return {**tensors, f"{head}.weight": tensors[embedding]}


def _compare(name: str, module: nn.Module | None, leaf: str, tensor: Tensor) -> str:
    held = getattr(module, leaf, None)
    if module is None or not isinstance(held, Tensor):
        return "unknown"
    outcome = "unknown"
    if held.numel() and held.shape[1:] == tensor.shape[1:] and len(held) >= len(tensor):  # vocabularies are padded
        if not torch.equal(held[: len(tensor)], tensor.to(held)):
            raise WeightsNotHeld(f"{name} is not what was given")
        outcome = "equal"
    if leaf == "weight" and tensor.ndim == 2 and callable(getattr(module, "cpu_linear", None)):
        outcome = _probe(name, module, held, tensor) or outcome
    return outcome


def _probe(name: str, module: nn.Module, held: Tensor, tensor: Tensor) -> str:
    """Push a fixed input through the packed layer. Nothing, if this worker holds a slice of it."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_PROBES, tensor.shape[1], generator=random).to(tensor.dtype)
    try:
        outputs = module.cpu_linear(inputs, held, None)  # type: ignore[operator]
    except RuntimeError:  # a tensor-parallel slice takes other shapes
        return ""
    if outputs.shape[1] < len(tensor):
        return ""
    expected = inputs @ tensor.t()
    off = float((outputs[:, : len(tensor)] - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not off <= TOLERANCE.get(tensor.dtype, 2e-2):
        raise WeightsNotHeld(f"{name} computes with other weights than it was given: outputs differ by {off:.2g}")
    return "probed"
