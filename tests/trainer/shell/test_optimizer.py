import torch
from torch import nn

from trainer.config import OptimizerConfig
from trainer.optimizer import current_learning_rate, make_optimizer, named_moments, set_learning_rate


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
