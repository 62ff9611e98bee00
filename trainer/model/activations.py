"""Less memory or more speed for the layers of a model: activation checkpointing and torch.compile, both in place.

Neither changes the names of weights, so checkpoints and publishes do not know of them.
"""

import os
import shutil
from importlib.util import find_spec

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.errors import ModelUnusable


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass, which computes the rest again.

    transformers does it for layers in training mode; ours stay in evaluation mode inside (no dropout), so only the flag
    of the layers themselves is set. Raises `ModelUnusable`.
    """
    layers = _layers(model, "model.activation_checkpointing")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def compile_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Compile each layer for rows of any length. Attention stays outside (`AttentionKernel.install`): its loops and
    tables depend on the lengths of the samples, and every new row would compile again. Raises `ModelUnusable`."""
    reason = why_not_compiled(device)
    if reason is not None:
        raise ModelUnusable(f"model.compile = true cannot work on {device.type}: {reason}")
    for layer in _layers(model, "model.compile"):
        layer.compile(dynamic=True)


def why_not_compiled(device: torch.device) -> str | None:
    """What torch.compile lacks here; `None` if nothing."""
    if device.type == "cpu":
        compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
        return None if any(map(shutil.which, compilers)) else f"no C++ compiler is installed ({', '.join(compilers)})"
    return None if find_spec("triton") else "the package triton is not installed"


def _layers(model: PreTrainedModel, key: str) -> list[GradientCheckpointingLayer]:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelUnusable(f"{key} does not work for {type(model).__name__}: transformers does not name its layers")
    return layers
