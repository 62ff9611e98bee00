"""What is measured of the tokens and samples of a micro batch, per env."""

import torch
from torch import Tensor

from trainer.env_stats import EnvStats
from trainer.logprobs import TokenScores
from trainer.losses.components import rl_inputs
from trainer.losses.protocol import RlOutputs
from trainer.micro_batch import LossTokens, MicroBatch

METRICS = (
    "entropy",
    "mismatch_kl",
    "ratio",
    "is_masked",
    "is_masked_high",
    "is_masked_low",
    "reward",
    "advantage",
    "length",
    "trained_length",
)
"""The first six count tokens, the others samples. `mismatch_kl` is ratio - 1 - log ratio: 0 on policy, else more."""


def observe(stats: EnvStats, batch: MicroBatch, scores: TokenScores, rl: RlOutputs | None) -> None:
    """Count one micro batch. No synchronisation with the device."""
    if batch.is_dummy:
        return
    tokens = batch.loss_tokens
    token_envs = batch.env_ids[tokens.segments]
    stats.add("entropy", scores.entropies, token_envs)
    members = _off_policy_members(tokens)
    if members is not None:
        inputs = rl_inputs(batch, scores)
        ratio = inputs.ratio.detach()
        stats.add("ratio", ratio, token_envs, members)
        stats.add("mismatch_kl", ratio - 1 - inputs.log_ratio.detach(), token_envs, members)
    if rl is not None and tokens.rl_weights is not None:
        for name in ("is_masked", "is_masked_high", "is_masked_low"):
            stats.add(name, getattr(rl, name), token_envs, tokens.rl_weights != 0)
    _observe_samples(stats, batch)


def _observe_samples(stats: EnvStats, batch: MicroBatch) -> None:
    lengths = torch.tensor(batch.seq_lens[: batch.sample_count], device=batch.env_ids.device)
    trained = torch.zeros_like(lengths).index_add_(
        0, batch.loss_tokens.segments, torch.ones_like(batch.loss_tokens.segments)
    )
    stats.add("reward", batch.rewards, batch.env_ids)
    stats.add("advantage", batch.advantages, batch.env_ids)
    stats.add("length", lengths, batch.env_ids)
    stats.add("trained_length", trained, batch.env_ids)


def _off_policy_members(tokens: LossTokens) -> Tensor | None:
    """Tokens for which the ratio to the behaviour policy means something; `None`: no such token."""
    streams = [weights != 0 for weights in (tokens.rl_weights, tokens.ref_kl_weights) if weights is not None]
    return torch.stack(streams).any(0) if streams else None
