"""FSDP2 over a policy, with one contract: gradients are **summed** over ranks, on gloo and NCCL alike.

Each rank divides its loss by the global denominator, so the sum is the gradient of the global mean, and no path can
forget to rescale. Dividing by 1 alone would ask gloo for a reduction it does not have, hence the forced plain sum.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable
from trainer.model.policy import Policy


def shard_policy(policy: Policy, mesh: DeviceMesh | None, *, reshard_after_forward: bool) -> Policy:
    """Shard in place over `mesh`: each decoder layer, then the rest. `None`: a single plain process, nothing to do."""
    if mesh is not None:
        layers = decoder_layers(policy.causal_lm)
        shard(policy, layers, mesh, policy.compute_dtype, reshard_after_forward=reshard_after_forward)
    return policy


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    reshard_after_forward: bool = False,
) -> None:
    """Shard `layers` and then the rest of `root` in place, to compute in `dtype`."""
    mixed = MixedPrecisionPolicy()
    if dtype != torch.float32:
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard_after_forward)
    # What goes into the root is a micro batch: temperatures must not be rounded (0.7 would become 0.6992).
    exact = replace(mixed, cast_forward_inputs=False)
    # The root's own weights (embedding, head) open the backward pass: freeing them first would gather them twice.
    fully_shard(root, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    _use_sum_reduction(root)


def reshard(root: nn.Module) -> None:
    """Free full parameters after a forward pass that no backward pass follows, which would have done it."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers says must stay whole."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelUnusable(f"{type(model).__name__} does not say which of its modules are decoder layers")
    return layers


def _use_sum_reduction(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
