"""From the config to the parts of a run: layout, seeds, digest, and whether the ranks can be divided."""

import random

import numpy as np
import torch
import xxhash

from runtime.errors import UserError
from trainer.config.trainer import ParallelConfig, TrainerConfig
from trainer.model.policy import Policy
from trainer.planning.layout import Layout, RowSharing, Weighting
from trainer.ranks import Ranks


def fake_vocab_size(policy: Policy) -> int:
    """Tokens that random text may hold: those below the image token, which text must not have."""
    size: int = policy.causal_lm.config.get_text_config().vocab_size
    return size if policy.images is None else min(size, policy.images.spec.image_token_id)


def check_ranks(config: ParallelConfig, world_size: int) -> None:
    """Raise `UserError` unless the ranks can be divided as `config` says."""
    if world_size % (config.dp_replicate * config.cp):
        raise UserError(
            f"{world_size} rank(s) cannot be divided by parallel.dp_replicate = {config.dp_replicate} times "
            f"parallel.cp = {config.cp}: start a multiple of {config.dp_replicate * config.cp}"
        )


def make_layout(config: TrainerConfig, ranks: Ranks, sharing: RowSharing = RowSharing.TEXT) -> Layout:
    """How a batch is cut, for this rank."""
    return Layout(
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_batch_tokens=config.micro_batch_tokens,
        seq_len=config.model.seq_len,
        num_mini_batches=config.mini_batches,
        num_epochs=config.epochs,
        weighting=Weighting(config.weighting),
        seed=config.seed,
        cp=config.parallel.cp,
        sharing=sharing,
    )


def seed_everything(seed: int, num_threads: int) -> None:
    """The same start on every rank: training must not depend on which rank drew which number."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(num_threads)


def config_digest(config: TrainerConfig) -> str:
    """Digest of what decides the weights: a resumed run with another one is a different experiment."""
    plan = {"micro_batch_max_tokens", "mini_batches", "epochs", "weighting", "pack_multimodal"}
    keys = {"model", "max_steps", "seed", "loss", "critic", "optimizer", "schedule"} | plan
    return xxhash.xxh3_128_hexdigest(config.model_dump_json(include=keys).encode())
