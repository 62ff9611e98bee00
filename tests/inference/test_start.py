"""From a config to a running engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from inference.api.generation import Job
from inference.config import InferenceConfig
from inference.errors import WeightsRefused
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import load_engine
from runtime.errors import UserError
from tests.support.models import EOS, VOCAB_SIZE, make_model, publish


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
        {"torch": {"max_waiting": 0}},
        {"server": {"port": -1}},
        {"server": {"request_timeout_s": 0}},
        {"server": {"grace_s": -1}},
        {"model": {"path": "m", "dtype": "int8"}},
        {"engine": "magic"},
        {"unknown": 1},
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config(Path("m"), **fields)
