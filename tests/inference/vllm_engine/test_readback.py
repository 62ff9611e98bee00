"""The proof that a model holds what it was given, on modules shaped like vLLM's: fused, packed, padded, tied."""

import pytest
import torch
from torch import Tensor, nn

from inference.errors import WeightsNotHeld
from inference.vllm_engine.readback import Readback, fuse, read_back

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class PackedLinear(nn.Module):
    """As vLLM on a CPU: computes with a private copy; the parameter is empty, unless it is kept."""

    def __init__(self, weight: Tensor, *, keep: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight if keep else torch.empty(0))
        self.pack(weight)

    def pack(self, weight: Tensor) -> None:
        copy = weight.detach().clone()
        self.cpu_linear = lambda inputs, _, bias: nn.functional.linear(inputs, copy, bias)


def given() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {
        "model.embed_tokens": (6, 4),
        "model.attn.q_proj": (4, 4),
        "model.attn.k_proj": (2, 4),
        "model.attn.v_proj": (2, 4),
        "model.norm": (4,),
    }
    return {f"{name}.weight": torch.randn(shape, generator=random) for name, shape in shapes.items()}


def build(tensors: dict[str, Tensor]) -> nn.Module:
    """The model that holds `tensors`."""
    embedding = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(2, 4)])  # padded to eight rows
    root, model, attention = nn.Module(), nn.Module(), nn.Module()
    model.embed_tokens = nn.Embedding.from_pretrained(embedding)
    attention.qkv_proj = PackedLinear(torch.cat([tensors[f"model.attn.{part}.weight"] for part in PACKED["qkv_proj"]]))
    model.attn = attention
    model.norm = nn.RMSNorm(4)
    model.norm.weight = nn.Parameter(tensors["model.norm.weight"])
    root.model = model
    root.lm_head = PackedLinear(embedding, keep=True)
    return root


def test_everything_is_compared_or_probed() -> None:
    assert read_back(build(given()), given(), PACKED) == Readback(equal=2, probed=2, unknown=0)


def test_parts_become_vllms_modules() -> None:
    fused = fuse(given(), PACKED)
    assert sorted(fused) == ["model.attn.qkv_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert fused["model.attn.qkv_proj.weight"].shape == (8, 4)


def test_tied_head_that_kept_its_old_packed_copy_is_found() -> None:
    model = build(given())
    old = torch.cat([given()["model.embed_tokens.weight"] + 0.01, torch.zeros(2, 4)])
    model.lm_head.pack(old)  # type: ignore[operator, union-attr]
    with pytest.raises(WeightsNotHeld, match=r"lm_head\.weight computes with other weights"):
        read_back(model, given(), PACKED)


@pytest.mark.parametrize("name", [name for name in given() if "embed" not in name])
def test_any_tensor_that_was_not_loaded_is_found(name: str) -> None:
    stale = given()
    stale[name] = stale[name] + 1e-3
    with pytest.raises(WeightsNotHeld, match=r"model\.(attn\.qkv_proj|norm)\.weight"):
        read_back(build(stale), given(), PACKED)


def test_one_wrong_bit_of_a_plain_parameter_is_found() -> None:
    model = build(given())
    with torch.no_grad():
        model.model.norm.weight[0] *= 1 + 2**-22  # type: ignore[union-attr, operator, index]
    with pytest.raises(WeightsNotHeld, match=r"model\.norm\.weight is not what was given"):
        read_back(model, given(), PACKED)


def test_nan_in_a_packed_layer_is_found() -> None:
    model = build(given())
    model.lm_head.pack(torch.full((8, 4), float("nan")))  # type: ignore[operator, union-attr]
    with pytest.raises(WeightsNotHeld, match="lm_head"):
        read_back(model, given(), PACKED)


def test_slices_of_a_tensor_parallel_worker_are_unknown_not_wrong() -> None:
    model = build(given())
    model.model.attn.qkv_proj = PackedLinear(torch.randn(4, 4))  # type: ignore[union-attr]
    model.model.norm = nn.Identity()  # type: ignore[union-attr]
    assert read_back(model, given(), PACKED) == Readback(equal=1, probed=1, unknown=2)
