"""`check_loss`: the promises that every `rl` loss must keep, tried on a table of logits as the policy.

A table of logits, one row per preceding token, is the simplest policy whose gradient shows whatever a loss does to
single tokens. Plan, packing, denominators and components are those of training. All of it happens in one process: ranks
are played one after the other, and their gradients are added up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.batches.fake import probe_sample
from trainer.errors import LossInvalid
from trainer.losses.components import Denominators, count_members, micro_batch_loss
from trainer.losses.factory import CustomLoss
from trainer.losses.protocol import RlInputs, RlLoss
from trainer.model.logprobs import TokenScores
from trainer.planning.layout import Layout
from trainer.planning.pack import MicroBatch, pack_mini_batch
from trainer.planning.plan import plan_step
from transport.wire.codec import build_batch
from transport.wire.sample import EncodedTensor, TrainingSample

VOCAB_SIZE = 13
SEQ_LEN = 40


@dataclass(frozen=True)
class Split:
    """A way of cutting a batch that must not change its gradient."""

    world_size: int = 1
    cap: int = SEQ_LEN
    pad_multiple: int = 1
    order_seed: int | None = None
    repeats: int = 1


def batch_gradient(loss: RlLoss, samples: Sequence[TrainingSample], split: Split) -> Tensor:
    """Gradient of the table of logits for one batch, cut as `split` says."""
    rows = list(samples) * split.repeats
    if split.order_seed is not None:
        rows = [rows[place] for place in np.random.default_rng(split.order_seed).permutation(len(rows))]
    manifest = build_batch("check", 1, rows).manifest
    ranks = []
    for rank in range(split.world_size):
        plan = plan_step(manifest, Layout(rank, split.world_size, split.cap, SEQ_LEN))
        mine = {row: rows[row] for row in plan.rows_for(rank).tolist()}
        ranks.append(pack_mini_batch(plan, 0, rank, mine, split.pad_multiple))
    members = torch.stack([count_members(batches, 1) for batches in ranks]).sum(0)
    denominators = Denominators.of(members, torch.device("cpu"))
    table = _random_table()
    for batch in (batch for batches in ranks for batch in batches):
        micro_batch_loss(batch, _scores(table, batch), loss, denominators).total.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def random_inputs(num_tokens: int = 24) -> RlInputs:
    """Tokens of three samples, nearly on policy."""
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(num_tokens, generator=generator) * 4 - 0.01
    return RlInputs(
        logprobs=logprobs.requires_grad_(),
        behaviour_logprobs=logprobs.detach() + 0.2 * torch.randn(num_tokens, generator=generator),
        advantages=torch.randn(num_tokens, generator=generator),
        members=torch.ones(num_tokens, dtype=torch.bool),
        segments=torch.arange(num_tokens) * 3 // num_tokens,
        num_segments=3,
    )


def random_samples(*, with_weights: bool = False) -> list[TrainingSample]:
    """Eleven samples of 3 to 40 tokens; `with_weights` leaves a third of the trained tokens out of `rl`."""
    rng = np.random.default_rng(5)
    lengths = (12, 3, 31, 7, 40, 18, 5, 22, 9, 27, 15)
    return [_random_sample(row, length, rng, with_weights) for row, length in enumerate(lengths)]


def _random_sample(row: int, length: int, rng: np.random.Generator, with_weights: bool) -> TrainingSample:
    weights = (rng.random(length) < 0.67).astype(np.float32)
    weights[-1] = 1.0
    return probe_sample(
        rng.integers(0, VOCAB_SIZE, length),
        np.arange(length) >= max(1, length // 3),
        env_name="check",
        group=row // 4,
        member=row,
        logprobs=EncodedTensor.of(rng.normal(-2.5, 0.4, length).astype(np.float32)),
        advantages=float(rng.normal()),
        reward=float(rng.random()),
        rl_weights=EncodedTensor.of(weights) if with_weights else None,
    )


def _random_table() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator).mul_(0.5).requires_grad_()


def _scores(table: Tensor, batch: MicroBatch) -> TokenScores:
    tokens = batch.loss_tokens
    distributions = table[batch.token_ids[tokens.index - 1]].log_softmax(-1)
    logprobs = distributions.gather(-1, tokens.labels[:, None])[:, 0]
    return TokenScores(logprobs, torch.zeros_like(logprobs))


TOLERANCE = 1e-4
"""Largest relative difference of two gradients that ought to be equal; float32 sums in another order differ by 1e-6."""


@dataclass(frozen=True)
class LossCheck:
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


def check_loss(loss: CustomLoss) -> Iterator[LossCheck]:
    """Try every promise. A loss that raises fails the promise that it was tried on; `CustomLoss` raises for outputs of
    another shape."""
    yield _attempt("shape: one loss and two flags per token", lambda: _check_gradient(loss))
    yield _attempt("finite: extreme ratios and advantages", lambda: _check_finite(loss))
    yield _attempt("pure: the same again, inputs unchanged", lambda: _check_pure(loss))
    yield _attempt("members: tokens of other components have no say", lambda: _check_members(loss))
    for name, split in SPLITS.items():
        yield _attempt(name, lambda split=split: _check_split(loss, split))  # type: ignore[misc]


def _attempt(name: str, check: Callable[[], str]) -> LossCheck:
    """`check` says what it saw, or raises `LossInvalid`; anything else a user's code raises is a failure, too."""
    try:
        return LossCheck(name, True, check())
    except LossInvalid as error:
        return LossCheck(name, False, str(error))
    except Exception as error:
        return LossCheck(name, False, f"{type(error).__name__}: {error}")


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
