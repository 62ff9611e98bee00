"""Proof that the model holds the tensors it was given, as far as vLLM lets one look.

Parameters are compared byte by byte. On a CPU vLLM packs the matrices of linear layers into a form that cannot be read
back and empties the parameter; those are probed: a fixed input goes through the layer, and the output must be that of
the matrix that was given, up to rounding. This finds a layer that kept its old weights (a tied head does),
unless both differ by less than rounding.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from inference.errors import WeightsNotHeld
from inference.weights.adapters import adapter_pairs

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


NUM_PROBES = 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference that rounding explains, as a share of the largest output."""
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


_Part = Tensor | Sequence[Tensor | None] | None


def check_held(
    held: "LoRAModel | None", tensors: Mapping[str, Tensor], scale: float, packed: Mapping[str, list[str]]
) -> None:
    """Raise `WeightsNotHeld`, naming the module, unless `held` is the adapter of these tensors and nothing else.

    vLLM keeps adapters as they are, but for the scale, which goes into `B`, and for fused modules, whose parts share
    an entry. So all of it can be compared bit by bit.
    """
    if held is None:
        raise WeightsNotHeld("vLLM does not hold the adapter")
    entries: set[str] = set()
    for module, pair in adapter_pairs(tensors).items():
        entry, place = _entry_of(module, held.loras, packed)
        entries.add(entry)
        lora_a, lora_b = (_part(half, place) for half in (held.loras[entry].lora_a, held.loras[entry].lora_b))
        if lora_a is None or lora_b is None:
            raise WeightsNotHeld(f"vLLM does not hold the adapter of {module}")
        if not torch.equal(lora_a, pair.lora_a.to(lora_a)) or not torch.equal(lora_b, pair.lora_b.to(lora_b) * scale):
            raise WeightsNotHeld(f"the adapter of {module} is not what was given")
    if foreign := held.loras.keys() - entries:
        raise WeightsNotHeld(f"vLLM holds an adapter of {sorted(foreign)[0]}, which was not given")


def _entry_of(module: str, loras: Container[str], packed: Mapping[str, list[str]]) -> tuple[str, int | None]:
    """The name of the entry that holds the module, and its place in there if it is fused with others."""
    if module in loras:
        return module, None
    parent, _, last = module.rpartition(".")
    for whole, parts in packed.items():
        entry = f"{parent}.{whole}"
        if last in parts and entry in loras:
            return entry, parts.index(last)
    raise WeightsNotHeld(f"vLLM does not hold the adapter of {module}")


def _part(half: _Part, place: int | None) -> Tensor | None:
    if isinstance(half, Tensor) or half is None:
        return half if place is None else None
    return None if place is None else half[place]
