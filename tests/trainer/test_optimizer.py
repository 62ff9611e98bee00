"""Optimizers and schedules: state made in advance, moments by name, the learning rate of every step."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.errors import UserError
from tests.trainer.runs import replay, weight_bytes
from tests.trainer.scenarios import save_tiny_model
from trainer.config.model import LoraConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from trainer.config.trainer import TrainerConfig
from trainer.errors import ModelUnusable
from trainer.optimizer import (
    current_learning_rate,
    layer_matrices,
    learning_rate,
    make_optimizer,
    named_moments,
    set_learning_rate,
)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_made_in_advance_trains_like_plain_adamw():
    ours, plain = make_model(), make_model()
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    optimizers = (
        make_optimizer(ours, config),
        torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=config.betas, eps=config.eps, weight_decay=0.1),
    )
    for _ in range(3):
        step(ours, optimizers[0])
        step(plain, optimizers[1])
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_named_moments_are_the_live_tensors():
    model = make_model()
    optimizer = make_optimizer(model, OptimizerConfig())
    moments = named_moments(model, optimizer)
    assert len(moments) == 3 * len(list(model.parameters()))
    step(model, optimizer)
    assert moments["0.weight.step"].item() == 1
    assert moments["1.bias.exp_avg"].abs().sum() > 0


def test_frozen_parameters_have_no_moments():
    model = make_model()
    model[0].requires_grad_(False)
    assert {name.split(".")[0] for name in named_moments(model, make_optimizer(model, OptimizerConfig()))} == {"1"}


def test_learning_rate_of_the_next_step_can_be_set():
    optimizer = make_optimizer(make_model(), OptimizerConfig(lr=1e-3))
    set_learning_rate(optimizer, 0.5)
    assert current_learning_rate(optimizer) == 0.5


MUON = OptimizerConfig(type="muon", lr=1e-2, weight_decay=0.1)


def language_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def train_twice(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.arange(12)[None]).logits.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest(model_path: Path) -> None:
    ours, plain = language_model(model_path), language_model(model_path)
    matrices = [parameter for name, parameter in plain.named_parameters() if ".layers." in name and parameter.ndim == 2]
    rest = [parameter for parameter in plain.parameters() if all(parameter is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=MUON.betas, eps=MUON.eps, weight_decay=0.1)
    optimizer = make_optimizer(ours, MUON)
    assert len(layer_matrices(ours)) == len(matrices) == 14
    train_twice(ours, optimizer)
    train_twice(plain, muon, adamw)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_pair_of_optimizers_has_one_rate_and_the_moments_of_both(model_path: Path) -> None:
    model = language_model(model_path)
    optimizer = make_optimizer(model, MUON)
    set_learning_rate(optimizer, 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moments = named_moments(model, optimizer)
    train_twice(model, optimizer)
    assert all(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    assert moments["model.layers.0.mlp.up_proj.weight.momentum_buffer"].abs().sum() > 0
    assert moments["model.embed_tokens.weight.step"] == 2
    assert {name.rpartition(".")[0] for name in moments} == {name for name, _ in model.named_parameters()}


def test_a_run_with_muon_resumes_exactly(model_path: Path, recording: Path, tmp_path: Path) -> None:
    flags = ("--optimizer.type", "muon", "--schedule.type", "cosine", "--schedule.warmup-steps", "2")
    straight = replay(model_path, recording, tmp_path, "straight", *flags, "--max-steps", "4")
    replay(model_path, recording, tmp_path, "parts", *flags, "--max-steps", "4", "--checkpoint.interval-steps", "2")
    for path in (tmp_path / "parts" / "checkpoints").glob("step-00000004"):
        path.rename(tmp_path / "aside")
    resumed = replay(model_path, recording, tmp_path, "parts", *flags, "--max-steps", "4")
    assert weight_bytes(resumed, 4) == weight_bytes(straight, 4)


@pytest.mark.parametrize(
    ("optimizer", "config", "reason"),
    [
        ("adamw", {}, r"no optimizer\.model\.layers\..* of shape"),
        ("muon", {"vocab_size": 80}, r"no model\..* of shape \[80, "),
    ],
)
def test_a_run_goes_on_only_with_the_optimizer_and_model_that_it_began_with(
    optimizer: str, config: dict[str, int], reason: str, recording: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "first")
    replay(model, recording, tmp_path, "run", "--optimizer.type", "muon", "--max-steps", "1")
    other = save_tiny_model(tmp_path / "second", **config)
    with pytest.raises(UserError, match=reason):
        replay(other, recording, tmp_path, "run", "--optimizer.type", optimizer)


def test_muon_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="finds no layers with matrices in Sequential"):
        make_optimizer(make_model(), MUON)
    with pytest.raises(ValueError, match=r"an adapter \(model.lora\) needs 'adamw'"):
        TrainerConfig(model=ModelConfig(path=tmp_path, lora=LoraConfig()), optimizer=MUON)


def rates(schedule: ScheduleConfig, max_steps: int | None, num_steps: int) -> list[float]:
    return [learning_rate(step, 1.0, schedule, max_steps) for step in range(1, num_steps + 1)]


def test_constant_schedule_is_the_peak_from_the_first_step():
    assert rates(ScheduleConfig(), None, 3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_and_never_trains_with_zero():
    assert rates(ScheduleConfig(warmup_steps=3), None, 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_schedule_falls_from_the_peak_to_the_floor_at_the_last_step():
    found = rates(ScheduleConfig(type="linear", min_lr_ratio=0.2), 5, 5)
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_schedule_has_half_of_its_fall_in_the_middle():
    found = rates(ScheduleConfig(type="cosine", warmup_steps=1), 6, 6)
    assert found[:2] == pytest.approx([0.5, 1.0])
    assert found[3] == pytest.approx(0.5)
    assert found[5] == pytest.approx(0.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decayed_rate_stays_at_the_floor_beyond_the_end(kind):
    schedule = ScheduleConfig(type=kind, min_lr_ratio=0.1)
    assert learning_rate(50, 2.0, schedule, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_one_step_runs_do_not_divide_by_zero(kind):
    assert learning_rate(1, 1.0, ScheduleConfig(type=kind), 1) == 1.0
