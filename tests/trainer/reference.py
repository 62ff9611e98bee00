"""What the trainer must compute, written as plainly as possible and sharing none of its code.

Transformers' own eager attention, one sample at a time, a full log_softmax, everything in float64.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from transport.wire.sample import EncodedTensor, TrainingSample

Batch = list[TrainingSample]


def load_reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def sample_logprobs(model: PreTrainedModel, sample: TrainingSample, seq_len: int) -> tuple[Tensor, Tensor]:
    """(log probability, entropy) of every token after the first."""
    token_ids = torch.from_numpy(sample.token_ids.numpy()[:seq_len].astype(np.int64))
    logits = model(token_ids[None], use_cache=False).logits[0, :-1] / sample.temperature
    distribution = logits.log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, token_ids[1:, None])[:, 0], entropies


def reference_loss(
    model: PreTrainedModel, samples: Batch, seq_len: int, loss: str = "dppo", weighting: str = "token"
) -> Tensor:
    """Of each component: the mean over its tokens in each unit, then over the units. Components are added up."""
    losses: dict[str, dict[str, list[Tensor]]] = {"rl": {}, "ce": {}, "ref_kl": {}}
    for row, sample in enumerate(samples):
        logprobs, _ = sample_logprobs(model, sample, seq_len)
        mask = _column(sample.loss_mask, sample, seq_len)
        streams = {
            "rl": (lambda keep, x=logprobs, s=sample: rl_losses(loss, x, s, seq_len, keep), sample.rl_weights, 1.0),
            "ce": (lambda keep, x=logprobs: -x, sample.ce_weights, 0.0),
            "ref_kl": (lambda keep, x=logprobs, s=sample: ref_kl(x, s, seq_len), sample.ref_kl_weights, 0.0),
        }
        for name, (values, weights, absent) in streams.items():
            weight = _column(absent if weights is None else weights, sample, seq_len) * mask
            if (weight != 0).any():
                unit = losses[name].setdefault(unit_name(weighting, sample, row), [])
                unit.append((values(weight != 0) * weight)[weight != 0])
    means = [
        torch.stack([torch.cat(unit).mean() for unit in units.values()]).mean() for units in losses.values() if units
    ]
    return torch.stack(means).sum()


def unit_name(weighting: str, sample: TrainingSample, row: int) -> str:
    return {"token": "", "sample": str(row), "trajectory": sample.trajectory_id, "group": sample.group_id}[weighting]


def reference_gradients(
    path: Path, samples: Batch, seq_len: int, loss: str = "dppo", weighting: str = "token"
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient by parameter name) of one batch on one model."""
    model = load_reference(path)
    total = reference_loss(model, samples, seq_len, loss, weighting)
    total.backward()
    return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def rl_losses(loss: str, logprobs: Tensor, sample: TrainingSample, seq_len: int, members: Tensor) -> Tensor:
    """One token at a time, by the formulas of docs/algorithms.md and the limits of `scenarios.LOSSES`."""
    old = _column(sample.logprobs, sample, seq_len)
    advantages = _column(sample.advantages, sample, seq_len)
    sample_ratio = float((logprobs - old)[members].mean().exp().detach())
    tokens = zip(logprobs, old, advantages, strict=True)
    return torch.stack([_rl_loss(loss, new, then, float(advantage), sample_ratio) for new, then, advantage in tokens])


def ref_kl(logprobs: Tensor, sample: TrainingSample, seq_len: int) -> Tensor:
    reference = _column(sample.ref_logprobs or 0.0, sample, seq_len)
    weight = (logprobs - _column(sample.logprobs, sample, seq_len)).exp().detach().clamp(max=10.0)
    gap = weight * (logprobs - reference).detach()
    return gap + gap * (logprobs - logprobs.detach())


def _rl_loss(loss: str, new: Tensor, old: Tensor, advantage: float, sample_ratio: float) -> Tensor:
    ratio = (new - old).exp()
    moved = float((new.exp() - old.exp()).detach())
    squared = 1e-3 * (new - old) ** 2
    if loss == "dppo":
        masked = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
        return squared if masked else squared - advantage * ratio
    if loss == "ipo":
        return squared if abs(moved) > 0.1 else squared - advantage * ratio
    if loss == "ppo_clip":
        return -min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if loss == "grpo_clip_higher":
        return -min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    if loss == "gspo":
        ratio = sample_ratio * (new - new.detach()).exp()
        return -min(ratio * advantage, ratio.clamp(0.7, 1.1) * advantage)
    if loss == "cispo":
        return -advantage * min(max(float(ratio.detach()), 0.5), 2.0) * new
    assert loss == "reinforce", loss
    return -advantage * new


def _column(value: float | EncodedTensor, sample: TrainingSample, seq_len: int) -> Tensor:
    """One number for every token after the first."""
    length = min(sample.num_tokens, seq_len)
    if isinstance(value, EncodedTensor):
        return torch.from_numpy(value.numpy()[1:length].astype(np.float64))
    return torch.full((length - 1,), float(value), dtype=torch.float64)
