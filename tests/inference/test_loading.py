"""A model is served exactly, or refused at start-up with the reason."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from inference.config import ServedModelConfig
from inference.torch_engine.loading import choose_device, eos_token_ids, load_slot_model
from runtime.errors import UserError
from tests.support.models import EOS

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def load(path: Path, length: int = 64) -> None:
    load_slot_model(ServedModelConfig(path=path, device="cpu"), 4, length)


def saved(path: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(path)
    return path


def test_length_above_the_positions_of_the_model_is_refused(model_dir: Path) -> None:
    with pytest.raises(UserError, match="513 is above the 512 positions"):
        load(model_dir, 513)


def test_single_slot_is_enough_to_load(model_dir: Path) -> None:
    assert load_slot_model(ServedModelConfig(path=model_dir, device="cpu"), 1, 2).cache.max_length == 2


def test_sliding_attention_is_served_only_within_its_window(tmp_path: Path) -> None:
    path = saved(tmp_path, MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=16)))
    load(path, 16)
    with pytest.raises(UserError, match=r"slides over 16 tokens.*max-model-len 16"):
        load(path, 17)


def test_attention_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, Gemma2ForCausalLM(Gemma2Config(**_SIZES)))
    with pytest.raises(UserError, match=r"cannot serve Gemma2ForCausalLM.*softcap"):
        load(path)


def test_model_with_state_besides_attention_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)))
    with pytest.raises(UserError, match="log probabilities differ"):
        load(path)


def test_folder_with_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(UserError, match="cannot load the model"):
        load(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot load the model"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loads_in_that_type(model_dir: Path, dtype: str) -> None:
    slots = load_slot_model(ServedModelConfig(path=model_dir, device="cpu", dtype=dtype), 4, 64)  # type: ignore[arg-type]
    assert slots.hf.dtype == getattr(torch, dtype)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match="warp:7"):
        choose_device("warp:7")
    assert choose_device("cpu") == torch.device("cpu")


def test_end_ids_come_from_generation_config_first(tmp_path: Path, model_dir: Path) -> None:
    assert eos_token_ids(model_dir) == {EOS}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 7}))
    assert eos_token_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert eos_token_ids(tmp_path) == {3, 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(tmp_path) == frozenset()
