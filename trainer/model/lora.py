"""LoRA by peft: layers put into the model in place, so that everything else finds its modules under their old names."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from trainer.config.model import LoraConfig
from trainer.errors import ModelUnusable
from trainer.weights.adapter import PEFT_NAME, Adapter
from trainer.weights.local_ranges import named_weights, raw_bytes, spec_of
from transport.wire.weights import hash_bytes, weights_digest

if TYPE_CHECKING:
    import peft


def add_lora(model: PreTrainedModel, config: LoraConfig, path: Path) -> Adapter:
    """Freeze `model` and put an adapter beside each target, which changes nothing yet (`B` is zero).

    `A` is drawn from torch's generator: ranks must have seeded it alike. Raises `ModelUnusable` with the reason.
    """
    _check_model(model, config, path)
    adapter = Adapter(
        rank=config.rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        base_path=str(path.resolve()),
        base_digest=base_digest(model),
    )
    from peft import inject_adapter_in_model  # seconds, and only for those who use it

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that targets may be tied: they are not
        inject_adapter_in_model(peft_config(adapter), model, adapter_name=PEFT_NAME)
    return adapter


def peft_config(adapter: Adapter) -> "peft.LoraConfig":
    """The adapter as a `LoraConfig` of peft."""
    from peft import LoraConfig as PeftLoraConfig

    return PeftLoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        base_model_name_or_path=adapter.base_path,
        task_type="CAUSAL_LM",
        inference_mode=False,
    )


def base_digest(model: PreTrainedModel) -> str:
    """`weights_digest` of all weights of a model without an adapter, as an engine computes it."""
    return weights_digest(
        (spec.name, spec.dtype, spec.shape, hash_bytes(raw_bytes(tensor)))
        for name, tensor in named_weights(model).items()
        for spec in (spec_of(name, tensor),)
    )


def _check_model(model: PreTrainedModel, config: LoraConfig, path: Path) -> None:
    if model.config.get_text_config() is not model.config:
        raise ModelUnusable(f"model.lora is for text models: {path} is a {type(model).__name__}, with other parts")
    modules = dict(model.named_modules())
    for target in config.target_modules:
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not found:
            raise ModelUnusable(f"model.lora.target_modules: {path} has no module {target!r}")
        if any(module is model.get_output_embeddings() for module in found):
            raise ModelUnusable(f"model.lora.target_modules: {target!r} is the head of {path}, which has no adapter")
        if any(type(module) is not nn.Linear for module in found):
            raise ModelUnusable(f"model.lora.target_modules: {target!r} of {path} is not a linear layer")
