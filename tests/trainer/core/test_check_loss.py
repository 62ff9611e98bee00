"""`trainer check-loss`: built-in losses keep every promise, and each way of breaking one is found and named."""

from collections.abc import Callable

import pytest
import torch

from runtime.errors import UserError
from tests.trainer.core import custom_losses
from tests.trainer.core.scenarios import LOSSES
from trainer.checks.loss import SPLITS, Split, batch_gradient, check_loss, random_samples
from trainer.cli import run
from trainer.losses.factory import CustomLoss, make_loss
from trainer.losses.protocol import RlInputs, RlOutputs

MODULE = custom_losses.__name__


@pytest.mark.parametrize("name", LOSSES)
def test_built_in_losses_keep_every_promise(name: str) -> None:
    failed = [check for check in check_loss(CustomLoss(name, make_loss(LOSSES[name]))) if not check.passed]
    assert not failed


def test_a_good_loss_of_the_user_passes() -> None:
    assert all(check.passed for check in check_loss(CustomLoss("good", custom_losses.good)))


@pytest.mark.parametrize("loss", custom_losses.BROKEN, ids=lambda loss: loss.__name__)
def test_a_broken_promise_is_named(loss: Callable[[RlInputs], RlOutputs]) -> None:
    failed = [check.name.partition(":")[0] for check in check_loss(CustomLoss(loss.__name__, loss)) if not check.passed]
    assert custom_losses.BROKEN[loss] in failed


def test_a_loss_that_raises_fails_with_its_message_and_does_not_end_the_suite() -> None:
    checks = list(check_loss(CustomLoss("raises", custom_losses.raises)))
    assert len(checks) == len(SPLITS) + 4
    assert {check.detail for check in checks} == {"KeyError: 'no such thing'"}


def test_the_probe_has_the_gradient_of_the_plain_mean() -> None:
    """The mean of -A x logprob over all trained tokens, without plan, packing or denominators."""
    samples = random_samples()
    actual = batch_gradient(make_loss(LOSSES["reinforce"]), samples, Split(world_size=2, cap=24))
    table = torch.randn(13, 13, generator=torch.Generator().manual_seed(4)).mul_(0.5).requires_grad_()
    losses = []
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids.numpy()).long()
        logprobs = table[tokens[:-1]].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        losses.append(-sample.advantages * logprobs[torch.from_numpy(sample.loss_mask.numpy()[1:].copy())])
    (expected,) = torch.autograd.grad(torch.cat(losses).mean(), table)
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_command_prints_a_table_and_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-loss", f"{MODULE}:good", "--kwargs", '{"scale": 2.0}']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{MODULE}:good: {len(SPLITS) + 4} of {len(SPLITS) + 4} checks passed"
    assert all(line.startswith("ok ") for line in lines[:-1])


def test_the_command_fails_for_a_loss_that_breaks_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-loss", f"{MODULE}:normalised_by_its_own_length"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  packing: one sample per micro batch" in out
    assert "the gradient changes by" in out


def test_a_loss_that_is_not_found_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no_such_loss"):
        run(["check-loss", f"{MODULE}:no_such_loss"])
    with pytest.raises(UserError, match="import_path is required"):
        run(["check-loss"])
