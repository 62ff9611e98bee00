"""Proof that a worker of vLLM holds the adapter it was given. Needs no vLLM.

vLLM keeps adapters as they are, but for the scale, which goes into `B`, and for fused modules, whose parts share an
entry. So all of it can be compared bit by bit.
"""

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inference.errors import WeightsNotHeld
from inference.torch_engine.adapter_pairs import adapter_pairs

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel

_Part = Tensor | Sequence[Tensor | None] | None


def check_held(
    held: "LoRAModel | None", tensors: Mapping[str, Tensor], scale: float, packed: Mapping[str, list[str]]
) -> None:
    """Raise `WeightsNotHeld`, naming the module, unless `held` is the adapter of these tensors and nothing else."""
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
