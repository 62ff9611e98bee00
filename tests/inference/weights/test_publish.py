"""Only a whole, sound publish of this model and run is accepted; everything else is refused by its reason.

The folder that vLLM reads an adapter from, and the proof that it holds it. Needs no vLLM.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from inference.errors import WeightsNotHeld, WeightsRefused
from inference.vllm_engine.readback import check_held
from inference.weights.adapters import adapter_pairs, read_adapter_folder, write_adapter_folder
from inference.weights.publish import check_fits, model_digest, read_publish, served_tensors
from inference.weights.receiver import WeightReceiver
from tests.support.models import make_model, publish, save_model, write_manifest
from transport.wire.weights import AdapterInfo, WeightManifest, read_weight_manifest


def read(path: Path, version: int = 1, run_id: str = "default") -> None:
    read_publish(path, version=version, run_id=run_id)


def first_shard(path: Path) -> Path:
    return path.parent / read_weight_manifest(path).shards[0].file


def rewrite(path: Path, change: Callable[[WeightManifest], WeightManifest]) -> None:
    write_manifest(path.parent, change(read_weight_manifest(path)))


def test_sound_publish_is_read_whole_and_has_the_digest_of_its_model(tmp_path: Path) -> None:
    model = make_model(1)
    weights = read_publish(publish(tmp_path, model, 1, num_shards=3), version=1, run_id="default")
    assert weights.digest == model_digest(model)
    for name, tensor in served_tensors(model):
        assert torch.equal(weights.tensors[name], tensor)
    check_fits(model, weights)


def test_files_that_nobody_waits_for_any_more_are_not_read_on(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(1), 1, num_shards=3)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(WeightsRefused, match="does not wait any more"):
        WeightReceiver("default").receive(str(path), 1, given_up)


@pytest.mark.parametrize("tied", [True, False])
def test_served_names_are_those_of_the_safetensors_file(tmp_path: Path, tied: bool) -> None:
    model = make_model(tied=tied)
    names = {name for name, _ in served_tensors(model)}
    assert names == set(load_file(save_model(tmp_path, model) / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied


def test_digest_sees_a_single_changed_bit_and_not_the_sharding(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    assert model_digest(model) == model_digest(other)
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    assert model_digest(model) != model_digest(other)
    one = read_weight_manifest(publish(tmp_path / "a", model, 1, num_shards=1))
    three = read_weight_manifest(publish(tmp_path / "b", model, 1, num_shards=3))
    assert one.digest == three.digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_hashed_by_its_raw_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    assert read_publish(publish(tmp_path, model, 1), version=1, run_id="default").digest == model_digest(model)


def test_bit_flip_in_a_shard_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    data = bytearray(first_shard(path).read_bytes())
    data[len(data) // 2] ^= 4
    first_shard(path).write_bytes(data)
    with pytest.raises(WeightsRefused, match=r"model-00001-of-00002\.safetensors is corrupt"):
        read(path)


def test_head_that_swaps_two_tensors_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1, num_shards=1)
    data = first_shard(path).read_bytes()
    first, second = b"layers.0.mlp.gate_proj", b"layers.1.mlp.gate_proj"
    swapped = data.replace(first, b"<swap>").replace(second, first).replace(b"<swap>", second)
    assert (len(swapped), swapped != data) == (len(data), True)
    first_shard(path).write_bytes(swapped)
    with pytest.raises(WeightsRefused, match=r"gate_proj\.weight of .* is corrupt"):
        read(path)


def test_torn_shard_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    first_shard(path).write_bytes(first_shard(path).read_bytes()[:-100])
    with pytest.raises(WeightsRefused, match="bytes, the manifest says"):
        read(path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    first_shard(path).unlink()
    with pytest.raises(WeightsRefused, match="No such file"):
        read(path)


def test_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match="no weight manifest"):
        read(tmp_path / "manifest.json")


def test_garbled_manifest_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WeightsRefused, match="does not decode"):
        read(path)


def test_manifest_whose_digest_is_not_of_its_tensors_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    rewrite(path, lambda manifest: msgspec.structs.replace(manifest, digest="0" * 32))
    with pytest.raises(WeightsRefused, match="inconsistent"):
        read(path)


def test_manifest_of_another_version_or_run_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1, run_id="theirs")
    with pytest.raises(WeightsRefused, match="of version 1"):
        read(path, version=2, run_id="theirs")
    with pytest.raises(WeightsRefused, match="run 'theirs', this engine belongs to 'ours'"):
        read(path, run_id="ours")


def test_shard_outside_the_publish_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    first = read_weight_manifest(path).shards[0]
    evil = msgspec.structs.replace(first, file=f"../{path.parent.name}/{first.file}")
    rewrite(path, lambda manifest: msgspec.structs.replace(manifest, shards=(evil, *manifest.shards[1:])))
    with pytest.raises(WeightsRefused, match="not a file name"):
        read(path)


def test_shard_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    garbage = b"\xff" * 64
    first_shard(path).write_bytes(garbage)
    first = read_weight_manifest(path).shards[0]
    honest = msgspec.structs.replace(first, num_bytes=len(garbage))
    rewrite(path, lambda manifest: msgspec.structs.replace(manifest, shards=(honest, *manifest.shards[1:])))
    with pytest.raises(WeightsRefused, match="not a safetensors file"):
        read(path)


def test_shards_that_lack_a_promised_tensor_are_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(), 1)
    rewrite(path, lambda manifest: msgspec.structs.replace(manifest, shards=manifest.shards[1:]))
    with pytest.raises(WeightsRefused, match="different tensors"):
        read(path)


def another_model(kind: str) -> PreTrainedModel:
    return {"tying": make_model(tied=False), "family": make_model(family="llama"), "dtype": make_model().bfloat16()}[
        kind
    ]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tying", r"unexpected lm_head\.weight"),
        ("family", r"missing model\.layers\.0\.self_attn\.k_norm\.weight"),
        ("dtype", "is torch.bfloat16.*the engine has torch.float32"),
    ],
)
def test_publish_of_another_model_is_refused(tmp_path: Path, model: PreTrainedModel, kind: str, reason: str) -> None:
    weights = read_publish(publish(tmp_path, another_model(kind), 1), version=1, run_id="default")
    with pytest.raises(WeightsRefused, match=reason):
        check_fits(model, weights)


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
