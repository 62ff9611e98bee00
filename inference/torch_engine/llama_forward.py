"""The decode step of Llama-like models, without the layers of Python around it.

One token per sequence is so little work for a small model that module calls, hooks and config look-ups take half of
the time. This is the same arithmetic on the same parameters (a weight swap changes them in place); loading compares it
with the model's own forward. N sequences, H heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from inference.torch_engine.attention import Slots

_MODELS = {
    LlamaForCausalLM: "model",
    Qwen2ForCausalLM: "model",
    Qwen3ForCausalLM: "model",
    Qwen2_5_VLForConditionalGeneration: "model.language_model",
    Qwen3VLForConditionalGeneration: "model.language_model",
}
"""Where the decoder is in each. A token of text has one position, so that of a vision model rotates like Llama's."""
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles do not depend on the length of the sequence."""

_Map = Callable[[Tensor], Tensor]


def is_llama_like(model: PreTrainedModel) -> bool:
    """Whether `LlamaForward` computes this model. Half precision is left to the model's own order of rounding."""
    if type(model) not in _MODELS or model.dtype != torch.float32:
        return False
    config = model.config.get_text_config()
    return config.hidden_act == "silu" and config.rope_parameters["rope_type"] in _STATIC_ROPE


class LlamaForward:
    """Called with `tokens[N]`, `positions[N]` and the slots to attend to; returns logits `[N, V]`."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        config = model.config.get_text_config()
        prefix = _MODELS[type(model)]
        weights = dict(model.named_parameters(remove_duplicate=False))
        self._embedding: Tensor = weights[f"{prefix}.embed_tokens.weight"]
        self._layers = [
            _Layer(weights, f"{prefix}.layers.{index}", index, config.rms_norm_eps, config.num_attention_heads)
            for index in range(config.num_hidden_layers)
        ]
        self._norm = _norm(weights[f"{prefix}.norm.weight"], config.rms_norm_eps)
        self._head = _linear(weights, "lm_head")
        positions = torch.arange(max_length, device=model.device)[None]
        cosine, sine = model.get_submodule(prefix).rotary_emb(self._embedding, positions)  # [1, max_length, D]
        self._cosine: Tensor = cosine[0]
        half = cosine.shape[-1] // 2
        self._sine = torch.cat([-sine[0, :, :half], sine[0, :, half:]], dim=-1)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Slots) -> Tensor:
        hidden = F.embedding(tokens, self._embedding)
        rotation = (self._cosine[positions][:, None], self._sine[positions][:, None])
        for layer in self._layers:
            hidden = layer(hidden, rotation, slots)
        return self._head(self._norm(hidden))


class _Layer:
    """One decoder layer; its maps hold the model's own parameters."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, index: int, epsilon: float, num_heads: int) -> None:
        self._index = index
        self._query, self._key, self._value, self._out = (
            _linear(weights, f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "o")
        )
        self._query_norm, self._key_norm = (
            _norm(weights.get(f"{name}.self_attn.{part}_norm.weight"), epsilon) for part in ("q", "k")
        )
        self._gate, self._up, self._down = (
            _linear(weights, f"{name}.mlp.{part}_proj") for part in ("gate", "up", "down")
        )
        self._before_attention = _norm(weights[f"{name}.input_layernorm.weight"], epsilon)
        self._before_mlp = _norm(weights[f"{name}.post_attention_layernorm.weight"], epsilon)
        self._head_size = weights[f"{name}.self_attn.q_proj.weight"].shape[0] // num_heads

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], slots: Slots) -> Tensor:
        hidden = hidden + self._out(self._attend(self._before_attention(hidden), rotation, slots))
        normed = self._before_mlp(hidden)
        return hidden + self._down(F.silu(self._gate(normed)) * self._up(normed))

    def _attend(self, normed: Tensor, rotation: tuple[Tensor, Tensor], slots: Slots) -> Tensor:
        heads = (len(normed), -1, self._head_size)  # [N, H or G, D]
        query = _rotated(self._query_norm(self._query(normed).view(heads)), rotation)
        key = _rotated(self._key_norm(self._key(normed).view(heads)), rotation)
        value = self._value(normed).view(heads)
        scaling = self._head_size**-0.5
        out = slots.attend(self._index, query[:, :, None], key[:, :, None], value[:, :, None], scaling)
        return out.reshape(len(normed), -1)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of `x[N, H, D]`: the sign of the rotated half is in the sines."""
    cosine, sine = rotation
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), sine)


def _linear(weights: Mapping[str, Tensor], name: str) -> _Map:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return lambda x: F.linear(x, weight, bias)


def _norm(weight: Tensor | None, epsilon: float) -> _Map:
    """RMS norm; models without this norm have no weight for it."""
    if weight is None:
        return lambda x: x
    return lambda x: x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight
