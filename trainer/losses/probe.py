"""Small batches and a stand-in for the model, to try a loss on.

A table of logits, one row per preceding token, is the simplest policy whose gradient shows whatever a loss does to
single tokens. Plan, packing, denominators and components are those of training. All of it happens in one process: ranks
are played one after the other, and their gradients are added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.denominators import Denominators, count_members
from trainer.layout import Layout
from trainer.logprobs import TokenScores
from trainer.losses.components import micro_batch_loss
from trainer.losses.protocol import RlInputs, RlLoss
from trainer.micro_batch import MicroBatch
from trainer.packing import pack_mini_batch
from trainer.plan import plan_step
from trainer.probe_sample import probe_sample
from transport.wire.batch import build_batch
from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor

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
