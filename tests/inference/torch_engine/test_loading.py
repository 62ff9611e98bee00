"""A model is served exactly, or refused at start-up with the reason; from a config to a running engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from inference.api.generation import Job
from inference.config import InferenceConfig, ServedModelConfig
from inference.errors import WeightsRefused
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import choose_device, eos_token_ids, load_engine, load_slot_model
from runtime.errors import UserError
from tests.support.models import EOS, VOCAB_SIZE, make_model, publish

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


def config(path: Path, **fields: object) -> InferenceConfig:
    defaults = {"model": {"path": path, "device": "cpu"}, "torch": {"max_batch_size": 4, "max_model_len": 32}}
    return InferenceConfig.model_validate(defaults | fields)


@asynccontextmanager
async def started(settings: InferenceConfig) -> AsyncIterator[TorchEngine]:
    engine, _ = load_engine(settings)(lambda: None)
    try:
        yield engine
    finally:
        await engine.stop(grace_s=5)


def job(max_tokens: int = 12) -> Job:
    return Job(prompt=np.array([5, 6], dtype=np.int32), max_tokens=max_tokens)


async def test_limits_and_end_ids_are_those_of_config_and_model(model_dir: Path) -> None:
    async with started(config(model_dir)) as engine:
        limits = engine.limits
        assert (limits.vocab_size, limits.max_model_len, limits.max_batch_size) == (VOCAB_SIZE, 32, 4)
        assert limits.max_waiting == 16384
        assert engine.eos_token_ids == {EOS}
        assert engine.served.version == 0


async def sampled(settings: InferenceConfig) -> list[bytes]:
    async with started(settings) as engine:
        return [(await engine.generate(job())).token_ids.tobytes() for _ in range(3)]


async def test_servers_seed_decides_what_requests_without_one_get(model_dir: Path) -> None:
    first, again = await sampled(config(model_dir, seed=1)), await sampled(config(model_dir, seed=1))
    other = await sampled(config(model_dir, seed=2))
    assert first == again
    assert len({*first, *other}) == 6


async def test_number_of_threads_is_the_configs(model_dir: Path) -> None:
    before = torch.get_num_threads()
    try:
        async with started(config(model_dir, torch={"num_threads": 2, "max_model_len": 16, "max_batch_size": 1})):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


async def test_publish_of_another_run_is_refused_by_the_name_of_this_one(model_dir: Path, tmp_path: Path) -> None:
    path = publish(tmp_path, make_model(1), 1, run_id="mine")
    async with started(config(model_dir, run={"name": "mine"})) as engine:
        assert (await engine.apply_weights(path, 1)).version == 1
    async with started(config(model_dir, run={"name": "yours"})) as engine:
        with pytest.raises(WeightsRefused, match="'yours'"):
            await engine.apply_weights(path, 1)


def test_model_that_cannot_be_loaded_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot load the model"):
        load_engine(config(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"torch": {"max_batch_size": 0}},
        {"torch": {"max_model_len": 1}},
        {"torch": {"num_threads": 0}},
        {"server": {"port": -1}},
        {"weights": {"timeout_s": 0}},
        {"server": {"grace_s": -1}},
        {"model": {"path": "m", "dtype": "int8"}},
        {"engine": "magic"},
        {"unknown": 1},
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config(Path("m"), **fields)
