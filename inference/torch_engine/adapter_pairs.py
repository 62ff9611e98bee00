"""The tensors of an adapter, module by module, held against the model that it is for."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from inference.errors import WeightsRefused
from inference.torch_engine.weights import VerifiedWeights
from transport.wire.weights import AdapterInfo

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Pair(NamedTuple):
    """`lora_b @ lora_a` is what the adapter adds to a weight, but for the scale."""

    lora_a: Tensor
    lora_b: Tensor


def adapter_pairs(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """The pairs by the name of the module. Raises `ValueError` for a tensor that is not half of one."""
    modules = sorted({name.removesuffix(_A).removesuffix(_B) for name in tensors})
    try:
        return {module: Pair(tensors[module + _A], tensors[module + _B]) for module in modules}
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
) -> dict[str, Pair]:
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
