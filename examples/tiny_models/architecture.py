"""The tiny Qwen3: 105k parameters, and everything a real one has (grouped queries, q/k norm, tied embeddings)."""

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, head_gain: float = 1.0) -> Qwen3ForCausalLM:
    """A randomly initialised float32 model for `tokenizer`: the same weights for the same seed and gain."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU attention serves 32 and 64, and dies on hidden_size / heads = 16
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, head_gain)
    model.generation_config = sampling_defaults(tokenizer)
    return model


def sampling_defaults(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Plain sampling at temperature 1."""
    # Hugging Face truncates to the 50 likeliest tokens unless told otherwise: half of this vocabulary.
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
