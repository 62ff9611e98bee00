"""The short decode step gives the logits of the model's own forward, for every variant it claims."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inference.torch_engine.attention import ATTENTION_NAME, register
from inference.torch_engine.llama_forward import is_llama_like
from inference.torch_engine.slot_model import SlotModel

LENGTH = 48
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True)),
    "llama3 rotary": (LlamaForCausalLM, LlamaConfig(**_SIZES, rope_parameters=_LLAMA3)),
    "one head each": (LlamaForCausalLM, LlamaConfig(**_SIZES | {"num_key_value_heads": 4})),
    "one head for all": (LlamaForCausalLM, LlamaConfig(**_SIZES | {"num_key_value_heads": 1})),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=16)),
    "qwen3 yarn": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=8, rope_parameters=_YARN)),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True)),
}


def randomised(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Norms and biases too: at 1 and 0 they would hide mistakes."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_forward(name: str) -> None:
    model = randomised(*VARIANTS[name])
    assert is_llama_like(model)
    lengths = (1, 2, 20, LENGTH)
    rows = [torch.randint(0, 40, (length,), dtype=torch.int32).numpy() for length in lengths]
    model.set_attn_implementation("eager")
    expected = torch.stack([model(torch.from_numpy(row)[None], use_cache=False).logits[0, -1] for row in rows])
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    slots = SlotModel(model, num_slots=4, max_length=LENGTH)
    slots.prefill({slot: row[:-1] for slot, row in enumerate(rows)})
    logits = slots.decode(np.array([row[-1] for row in rows], dtype=np.int32), np.array(lengths) - 1)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_models_with_other_arithmetic_keep_their_own_forward() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert not is_llama_like(MistralForCausalLM(MistralConfig(**_SIZES)))
    assert not is_llama_like(LlamaForCausalLM(LlamaConfig(**_SIZES, hidden_act="gelu")))
    assert not is_llama_like(LlamaForCausalLM(LlamaConfig(**_SIZES)).bfloat16())
    assert not is_llama_like(LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=dynamic)))
