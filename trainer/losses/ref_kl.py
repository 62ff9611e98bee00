"""`ref_kl`: distance to a reference policy on sampled tokens, for distillation on the policy's own samples.

With policy p, behaviour policy b and reference q, a sampled token's loss is `w * log(p / q)` and its gradient
`w * log(p / q) * grad log p`, with the importance weight `w = p / b`, which has no gradient of its own. Over tokens
sampled from b, both are unbiased: the mean is KL(p || q), and the mean gradient is its gradient, since
`grad KL(p || q) = E_p[log(p / q) * grad log p]`. (Differentiating `log(p / q)` itself would give a gradient of mean 0,
and half its square, the other common choice, the right gradient but the wrong value, and both only for p = b.)
"""

from torch import Tensor

MAX_WEIGHT = 10.0
"""Importance weights are held here: a few tokens that the behaviour policy found unlikely must not be the batch."""


def ref_kl_losses(logprobs: Tensor, behaviour_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """float32[L]: the loss of each token."""
    fixed = logprobs.detach()
    weights = (fixed - behaviour_logprobs).exp().clamp(max=MAX_WEIGHT)
    signal = weights * (fixed - ref_logprobs)
    return signal * (logprobs - fixed).exp()
