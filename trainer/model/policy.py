"""`Policy`: a Hugging Face causal LM, with or without a vision tower, that scores the trained tokens of a micro batch.

The head is part of `forward`, so that FSDP gathers its weight for us, and only trained tokens go through it. Weights
are saved and published under the names of `causal_lm`, which are those of the model's own folder.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainer.config.model import ModelConfig
from trainer.errors import ModelUnusable
from trainer.images.spec import ImageSpec
from trainer.model.activations import checkpoint_activations, compile_layers
from trainer.model.attention import choose_kernel
from trainer.model.context_parallel import ContextParallel, gathered, own_tokens, part_of
from trainer.model.delta_net import separate_samples
from trainer.model.logprobs import TokenScores, token_scores
from trainer.model.lora import add_lora
from trainer.model.vision import ImageModel, hidden_with_images, image_model_of
from trainer.planning.pack import MicroBatch, SegmentInfo
from trainer.weights.adapter import Adapter

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest difference between the model's logits and ours, as a share of the largest logit."""


class Policy(nn.Module):
    """One row of packed segments in, one score per trained token out. Deterministic: no cache, no dropout."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        compute_dtype: torch.dtype = torch.float32,
        images: ImageModel | None = None,
        adapter: Adapter | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.compute_dtype = compute_dtype
        self.images = images
        """`None`: a model of text."""
        self.adapter = adapter
        """`None`: the whole model is trained."""
        self.context = context
        """The ranks that share rows with this one; `None`: every rank has rows of its own."""
        self.eval()

    @property
    def row_multiple(self) -> int:
        """Rows must have a multiple of this many tokens."""
        return 1 if self.context is None else self.context.size

    @property
    def image_spec(self) -> ImageSpec | None:
        """What image samples must be like; `None`: a model of text."""
        return None if self.images is None else self.images.spec

    def forward(self, batch: MicroBatch) -> TokenScores:
        """Scores of the trained tokens, in row order. The micro batch must be on the device of the model."""
        if self.context is not None:
            return self._forward_part(batch, self.context)
        tokens = batch.loss_tokens
        head = self.causal_lm.get_output_embeddings().weight
        # What predicts a token stands one place before it; position 0 of a segment is never trained.
        hidden = trunk_states(self, self.causal_lm.base_model, batch, self.compute_dtype, self.images)
        states = hidden[tokens.index - 1].to(head.dtype)
        return token_scores(states, head, tokens.labels, tokens.temperatures)._replace(states=states)

    def _forward_part(self, batch: MicroBatch, context: ContextParallel) -> TokenScores:
        """The same, computed together with the ranks that have the other parts of the row."""
        head = self.causal_lm.get_output_embeddings().weight
        part = context.part(len(batch.token_ids))
        own = own_tokens(batch, context, part)
        hidden = trunk_states(self, self.causal_lm.base_model, part_of(batch, part), self.compute_dtype, None)
        states = hidden[own.places].to(head.dtype)
        scores = token_scores(states, head, own.labels, own.temperatures)
        return gathered(scores._replace(states=states), context, own.kept)


def trunk_states(
    root: nn.Module, trunk: nn.Module, batch: MicroBatch, dtype: torch.dtype, images: ImageModel | None
) -> Tensor:
    """[T, H]: the last hidden states of a packed row. `root` is the module whose forward pass this is."""
    # FSDP casts parameters itself; a plain process has autocast do it.
    mixed = dtype != torch.float32 and not isinstance(root, FSDPModule)
    with torch.autocast(batch.token_ids.device.type, dtype, enabled=mixed):
        if batch.images is not None and images is not None:
            return hidden_with_images(
                trunk, images.family, batch.token_ids, batch.position_ids, batch.images, batch.segment_info()
            )[0]
        output = trunk(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            segments=batch.segment_info(),
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def load_policy(config: ModelConfig, device: torch.device, context: ContextParallel | None = None) -> Policy:
    """The model of `config.path` in float32 on `device`, with our attention. Raises `ModelUnusable` with the reason."""
    dtype = compute_dtype(config)
    kernel = choose_kernel(config.attention, device, dtype, shares_rows=context is not None)
    kernel.install(outside_of_graphs=config.compile)
    causal_lm, images = _from_folder(config.path, kernel.implementation)
    num_linear = separate_samples(causal_lm)
    _check_packable(causal_lm, config, num_linear)
    if num_linear and context is not None:
        raise ModelUnusable(
            f"{config.path} cannot be trained with parallel.cp: its linear attention needs whole samples"
        )
    adapter = None if config.lora is None else add_lora(causal_lm, config.lora, config.path)
    policy = Policy(causal_lm.to(device), dtype, images, adapter, context)
    _check_head(causal_lm, dtype, device, config.path)
    if config.activation_checkpointing:
        checkpoint_activations(causal_lm)
    if config.compile:
        compile_layers(causal_lm, device)
    return policy


def compute_dtype(config: ModelConfig) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def _from_folder(path: Path, attention: str) -> tuple[PreTrainedModel, ImageModel | None]:
    if not (path / "config.json").is_file():
        raise ModelUnusable(f"model.path = {str(path)!r} is not a Hugging Face model folder: it has no config.json")
    transformers_logging.disable_progress_bar()
    try:
        images = image_model_of(AutoConfig.from_pretrained(path, local_files_only=True))
        auto_model = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
        causal_lm, loading = auto_model.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention if images is None else _attention_by_tower(attention),
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnusable(f"model.path = {str(path)!r} cannot be loaded: {error}") from error
    if loading["missing_keys"]:
        names = ", ".join(sorted(loading["missing_keys"])[:3])
        raise ModelUnusable(f"model.path = {str(path)!r} lacks weights that would be random otherwise: {names}, ...")
    return causal_lm, images


def _attention_by_tower(text: str) -> dict[str, str]:
    """Ours for the row of tokens; for the images torch's, which transformers calls image by image."""
    return {"text_config": text, "vision_config": "sdpa", "": "sdpa"}


def _check_packable(causal_lm: PreTrainedModel, config: ModelConfig, num_linear: int) -> None:
    """Raise `ModelUnusable` with the reason. `num_linear` layers of linear attention keep samples apart."""
    text_config = causal_lm.config.get_text_config()
    layers = [kind for kind in getattr(text_config, "layer_types", None) or () if kind not in _PACKABLE_LAYERS]
    if layers != ["linear_attention"] * num_linear:
        raise ModelUnusable(f"{config.path} has layers that would mix packed samples: {', '.join(sorted(set(layers)))}")
    if getattr(text_config, "final_logit_softcapping", None) or causal_lm.get_output_embeddings().bias is not None:
        raise ModelUnusable(f"{config.path} has a soft-capped or biased head, which the chunked head does not compute")
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit is not None and config.seq_len > limit:
        raise ModelUnusable(f"model.seq_len ({config.seq_len}) is above the {limit} positions that {config.path} knows")


@torch.no_grad()
def _check_head(causal_lm: PreTrainedModel, dtype: torch.dtype, device: torch.device, path: Path) -> None:
    """Raise `ModelUnusable` unless the model's logits are its last hidden states times the head's weight.

    Some families scale them (Granite, Cohere). Nothing downstream would notice: packed and alone would be wrong alike.
    """
    head = causal_lm.get_output_embeddings().weight
    token_ids = torch.arange(8, device=device) % len(head)
    inputs = {"input_ids": token_ids[None], "position_ids": torch.arange(8, device=device)[None], "use_cache": False}
    segments = SegmentInfo.of((8,), device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        logits = causal_lm(**inputs, segments=segments).logits.float()
        states = causal_lm.base_model(**inputs, segments=segments).last_hidden_state
    error = (logits - states.to(head.dtype) @ head.T).abs().max() / logits.abs().max().clamp(min=1e-6)
    if not error <= _HEAD_TOLERANCE[dtype]:
        raise ModelUnusable(
            f"{path} does more than a matrix product in its head (a scale of the logits, say), which the chunked head "
            f"does not compute: its logits would be wrong by {float(error):.0%}"
        )
