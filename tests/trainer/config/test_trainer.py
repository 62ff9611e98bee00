from pathlib import Path

import pytest
from pydantic import ValidationError

from trainer.config.model import CriticConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from trainer.config.trainer import ExportConfig, ParallelConfig, TrainerConfig, WeightsConfig

MODEL = ModelConfig(path=Path("model"), seq_len=128)


def test_the_micro_batch_cap_is_the_sample_cap_unless_it_is_set():
    assert TrainerConfig(model=MODEL).micro_batch_tokens == 128
    assert TrainerConfig(model=MODEL, micro_batch_max_tokens=64).micro_batch_tokens == 64


def test_a_micro_batch_cap_above_the_sample_cap_is_rejected():
    with pytest.raises(ValidationError, match=r"micro_batch_max_tokens \(256\) is above model.seq_len \(128\)"):
        TrainerConfig(model=MODEL, micro_batch_max_tokens=256)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decaying_schedule_needs_an_end(kind):
    with pytest.raises(ValidationError, match="needs max_steps"):
        TrainerConfig(model=MODEL, schedule=ScheduleConfig(type=kind))
    assert TrainerConfig(model=MODEL, schedule=ScheduleConfig(type=kind), max_steps=5).max_steps == 5


@pytest.mark.parametrize("betas", [(1.0, 0.95), (0.9, -0.1)])
def test_decay_rates_are_shares(betas):
    with pytest.raises(ValidationError, match="betas"):
        OptimizerConfig(betas=betas)


def test_fewer_than_two_publishes_cannot_be_kept():
    with pytest.raises(ValidationError, match="keep"):
        WeightsConfig(keep=1)


@pytest.mark.parametrize("sources", [{}, {"checkpoint": Path("c"), "run": Path("r")}])
def test_an_export_has_exactly_one_source(sources):
    with pytest.raises(ValidationError, match="either --checkpoint or --run"):
        ExportConfig(out=Path("out"), **sources)


def test_unknown_keys_are_errors():
    with pytest.raises(ValidationError, match="Extra inputs"):
        TrainerConfig(model=MODEL, max_step=3)


def test_rows_with_images_cannot_be_shared_between_ranks(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    with pytest.raises(ValidationError, match=r"parallel\.cp cannot be used with a vision-language model"):
        TrainerConfig(model=ModelConfig(path=tmp_path), parallel=ParallelConfig(cp=2))


def test_rows_cannot_be_shared_with_a_critic():
    with pytest.raises(ValidationError, match=r"parallel\.cp and critic exclude each other"):
        TrainerConfig(model=MODEL, parallel=ParallelConfig(cp=2), critic=CriticConfig())


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"channel": "zmq", "host": "0.0.0.0"}, "set weights.keys_dir"),
        ({"channel": "collective", "host": "0.0.0.0"}, "process groups are not protected"),
        ({"channel": "collective", "host": "0.0.0.0", "keys_dir": "keys"}, "process groups are not protected"),
    ],
)
def test_weights_beyond_loopback_need_protection(keys, reason):
    with pytest.raises(ValidationError, match=reason):
        WeightsConfig(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"host": "0.0.0.0"},
        {"channel": "zmq"},
        {"channel": "zmq", "host": "0.0.0.0", "keys_dir": "keys"},
        {"channel": "zmq", "host": "0.0.0.0", "insecure": True},
        {"channel": "collective", "host": "0.0.0.0", "insecure": True},
    ],
)
def test_weights_config_that_is_protected_or_local(keys):
    assert WeightsConfig(**keys).channel == keys.get("channel", "filesystem")
