"""What the trainer must compute, written as plainly as possible and sharing none of its code.

Transformers' own eager attention, one sample at a time, a full log_softmax, everything in float64.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from transport.sample import TrainingSample
from transport.tensor import EncodedTensor

DELTA = 0.2
KL_COEF = 1e-3


def load_reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def sample_logprobs(model: PreTrainedModel, sample: TrainingSample, seq_len: int) -> tuple[Tensor, Tensor]:
    """(log probability, entropy) of every token after the first."""
    token_ids = torch.from_numpy(sample.token_ids.numpy()[:seq_len].astype(np.int64))
    logits = model(token_ids[None], use_cache=False).logits[0, :-1] / sample.temperature
    distribution = logits.log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, token_ids[1:, None])[:, 0], entropies


def reference_loss(model: PreTrainedModel, samples: list[TrainingSample], seq_len: int) -> Tensor:
    """Mean over the batch of each component, added up."""
    sums = {"rl": torch.zeros((), dtype=torch.float64), "ce": torch.zeros(()), "ref_kl": torch.zeros(())}
    counts = dict.fromkeys(sums, 0)
    for sample in samples:
        logprobs, _ = sample_logprobs(model, sample, seq_len)
        mask = _column(sample.loss_mask, sample, seq_len)
        per_token = {
            "rl": _dppo(logprobs, sample, seq_len),
            "ce": -logprobs,
            "ref_kl": 0.5 * (logprobs - _column(sample.ref_logprobs or 0.0, sample, seq_len)) ** 2,
        }
        weights = {
            "rl": 1.0 if sample.rl_weights is None else sample.rl_weights,
            "ce": sample.ce_weights or 0.0,
            "ref_kl": sample.ref_kl_weights or 0.0,
        }
        for name, values in per_token.items():
            weight = _column(weights[name], sample, seq_len) * mask
            sums[name] = sums[name] + (values * weight).sum()
            counts[name] += int((weight != 0).sum())
    return torch.stack([sums[name] / counts[name] for name in sums if counts[name]]).sum()


def reference_gradients(path: Path, samples: list[TrainingSample], seq_len: int) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient by parameter name) of one batch on one model."""
    model = load_reference(path)
    loss = reference_loss(model, samples, seq_len)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def _dppo(logprobs: Tensor, sample: TrainingSample, seq_len: int) -> Tensor:
    old = _column(sample.logprobs, sample, seq_len)
    advantages = _column(sample.advantages, sample, seq_len)
    losses = []
    for new_t, old_t, advantage in zip(logprobs, old, advantages, strict=True):
        moved = float((new_t.exp() - old_t.exp()).detach())
        masked = (advantage > 0 and moved > DELTA) or (advantage < 0 and moved < -DELTA)
        policy = 0.0 if masked else -advantage * (new_t - old_t).exp()
        losses.append(policy + KL_COEF * (new_t - old_t) ** 2)
    return torch.stack(losses)


def _column(value: float | EncodedTensor, sample: TrainingSample, seq_len: int) -> Tensor:
    """One number for every token after the first."""
    length = min(sample.num_tokens, seq_len)
    if isinstance(value, EncodedTensor):
        return torch.from_numpy(value.numpy()[1:length].astype(np.float64))
    return torch.full((length - 1,), float(value), dtype=torch.float64)
