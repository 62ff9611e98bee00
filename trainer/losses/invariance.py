"""`check_loss`: the promises that every `rl` loss must keep, tried on a loss that nobody has seen before."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.errors import LossInvalid
from trainer.losses.custom import CustomLoss
from trainer.losses.probe import Split, batch_gradient, random_inputs, random_samples
from trainer.losses.protocol import RlLoss
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

TOLERANCE = 1e-4
"""Largest relative difference of two gradients that ought to be equal; float32 sums in another order differ by 1e-6."""


@dataclass(frozen=True)
class Check:
    """One promise and whether it was kept."""

    name: str
    passed: bool
    detail: str


SPLITS = {
    "packing: one sample per micro batch": Split(cap=2),
    "cap: smaller micro batches": Split(cap=24),
    "padding: rows rounded up to 16 tokens": Split(pad_multiple=16),
    "order: samples shuffled": Split(order_seed=1),
    "ranks: split over 3": Split(world_size=3),
    "normalisation: every sample twice": Split(repeats=2),
}


def check_loss(loss: CustomLoss) -> Iterator[Check]:
    """Try every promise. A loss that raises fails the promise that it was tried on; `CustomLoss` raises for outputs of
    another shape."""
    yield _attempt("shape: one loss and two flags per token", lambda: _check_gradient(loss))
    yield _attempt("finite: extreme ratios and advantages", lambda: _check_finite(loss))
    yield _attempt("pure: the same again, inputs unchanged", lambda: _check_pure(loss))
    yield _attempt("members: tokens of other components have no say", lambda: _check_members(loss))
    for name, split in SPLITS.items():
        yield _attempt(name, lambda split=split: _check_split(loss, split))  # type: ignore[misc]


def _attempt(name: str, check: Callable[[], str]) -> Check:
    """`check` says what it saw, or raises `LossInvalid`; anything else a user's code raises is a failure, too."""
    try:
        return Check(name, True, check())
    except LossInvalid as error:
        return Check(name, False, str(error))
    except Exception as error:
        return Check(name, False, f"{type(error).__name__}: {error}")


def _check_split(loss: RlLoss, split: Split) -> str:
    samples = random_samples()
    expected, actual = batch_gradient(loss, samples, Split()), batch_gradient(loss, samples, split)
    if float(expected.norm()) == 0:
        raise LossInvalid("the gradient is 0: the loss does not depend on logprobs")
    return _compared(actual, expected)


def _check_members(loss: RlLoss) -> str:
    samples = random_samples(with_weights=True)
    changed = [_with_other_strangers(sample) for sample in samples]
    return _compared(batch_gradient(loss, changed, Split()), batch_gradient(loss, samples, Split()))


def _with_other_strangers(sample: TrainingSample) -> TrainingSample:
    """The same sample with other numbers at the tokens that do not belong to `rl`."""
    assert sample.rl_weights is not None
    own = sample.rl_weights.numpy() != 0
    logprobs = np.where(own, sample.logprobs.numpy(), -7.0).astype(np.float32)
    advantages = np.where(own, sample.advantages, 50.0).astype(np.float32)  # type: ignore[arg-type]
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    fields |= {"logprobs": EncodedTensor.of(logprobs), "advantages": EncodedTensor.of(advantages)}
    return TrainingSample(**fields)


def _compared(actual: Tensor, expected: Tensor) -> str:
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-12))
    if not error <= TOLERANCE:
        raise LossInvalid(f"the gradient changes by {error:.1e}, at most {TOLERANCE:.0e} is rounding")
    return f"gradient equal to {error:.0e}"


def _check_gradient(loss: RlLoss) -> str:
    inputs = random_inputs()
    if not loss(inputs).losses.requires_grad:
        raise LossInvalid("losses have no gradient: they must be computed from inputs.logprobs")
    return f"{len(inputs.logprobs)} tokens"


def _check_finite(loss: RlLoss) -> str:
    logprobs = torch.tensor([-60.0, -1e-6, -1e-6, -2.0, -60.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1e-6, -60.0, -1e-6, -2.0, -60.0, -1.0])
    advantages = torch.tensor([5.0, -5.0, 0.0, 0.0, 1.0, -1.0])
    inputs = replace(
        random_inputs(6), logprobs=logprobs, behaviour_logprobs=behaviour, advantages=advantages, num_segments=6
    )
    losses = loss(inputs).losses
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    if not (torch.isfinite(losses).all() and torch.isfinite(gradient).all()):
        raise LossInvalid("a loss or gradient is not finite for log ratios of 60 (inputs.ratio is held within exp(20))")
    return "log ratios up to 60"


def _check_pure(loss: RlLoss) -> str:
    inputs, untouched = random_inputs(), random_inputs()
    first, second = loss(inputs).losses, loss(inputs).losses
    if not torch.equal(first, second):
        raise LossInvalid("two calls with the same inputs differ")
    for name in ("logprobs", "behaviour_logprobs", "advantages", "members", "segments"):
        if not torch.equal(getattr(inputs, name), getattr(untouched, name)):
            raise LossInvalid(f"the call changed inputs.{name} in place")
    return "bit-equal"
