"""The folder that vLLM reads an adapter from, and the proof that it holds it. Needs no vLLM."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference.errors import WeightsNotHeld
from inference.vllm_engine.readback import check_held
from inference.weights.adapters import adapter_pairs, read_adapter_folder, write_adapter_folder
from transport.wire.weights import AdapterInfo

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SCALE = 1.5


@dataclass
class Layer:
    """As vLLM's: one tensor, or one per part of a fused module."""

    lora_a: "Tensor | list[Tensor | None]"
    lora_b: "Tensor | list[Tensor | None]"


@dataclass
class Held:
    loras: dict[str, Layer] = field(default_factory=dict)


def given() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        f"model.{module}.lora_{part}.weight": torch.randn((2, 6) if part == "A" else (4, 2), generator=random)
        for module in ("attn.q_proj", "attn.v_proj", "mlp.down_proj")
        for part in "AB"
    }


def held(tensors: dict[str, Tensor]) -> Held:
    """What vLLM makes of the adapter: the scale is in `B`, and the query and value share an entry."""
    pairs = adapter_pairs(tensors)
    q, v, down = (pairs[f"model.{name}"] for name in ("attn.q_proj", "attn.v_proj", "mlp.down_proj"))
    fused = Layer([q.lora_a, None, v.lora_a], [q.lora_b * SCALE, None, v.lora_b * SCALE])
    return Held({"model.attn.qkv_proj": fused, "model.mlp.down_proj": Layer(down.lora_a, down.lora_b * SCALE)})


def test_adapter_that_is_held_passes() -> None:
    check_held(held(given()), given(), SCALE, PACKED)


@pytest.mark.parametrize("name", sorted(given()))
def test_one_wrong_number_is_found(name: str) -> None:
    wrong = given()
    wrong[name][0, 0] += 1e-6
    with pytest.raises(WeightsNotHeld, match="not what was given"):
        check_held(held(wrong), given(), SCALE, PACKED)


def test_wrong_scale_is_found() -> None:
    with pytest.raises(WeightsNotHeld, match="not what was given"):
        check_held(held(given()), given(), 2 * SCALE, PACKED)


def test_missing_and_foreign_modules_are_found() -> None:
    part = {name: tensor for name, tensor in given().items() if "down_proj" not in name}
    with pytest.raises(WeightsNotHeld, match="which was not given"):
        check_held(held(given()), part, SCALE, PACKED)
    less = held(given())
    del less.loras["model.mlp.down_proj"]
    with pytest.raises(WeightsNotHeld, match=r"model\.mlp\.down_proj"):
        check_held(less, given(), SCALE, PACKED)
    with pytest.raises(WeightsNotHeld, match="does not hold the adapter"):
        check_held(None, given(), SCALE, PACKED)


def test_folder_has_the_config_and_gives_the_tensors_back(tmp_path: Path) -> None:
    info = AdapterInfo(rank=2, alpha=3, base_digest="x")
    write_adapter_folder(tmp_path / "a", info, adapter_pairs(given()))
    back = read_adapter_folder(tmp_path / "a")
    assert back.keys() == given().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in given().items())
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
