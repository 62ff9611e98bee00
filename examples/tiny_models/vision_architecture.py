"""The tiny Qwen3-VL: 340k parameters, and everything a real one has (MRoPE, deepstack, merged patches, tied head)."""

import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiny_models.architecture import sampling_defaults
from tiny_models.tokenizer import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START

PATCH_SIZE = 4
MERGE_SIZE = 2
POSITIONS_PER_SIDE = 4


def build_vision_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, head_gain: float = 1.0
) -> Qwen3VLForConditionalGeneration:
    """A randomly initialised float32 model for `tokenizer`: the same weights for the same seed and gain."""
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), _ids(tokenizer), strict=True))
    config = Qwen3VLConfig(
        text_config=_text(tokenizer),
        vision_config=_vision(),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **{f"{name}_token_id": token_id for name, token_id in ids.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    torch.nn.init.constant_(model.model.language_model.norm.weight, head_gain)
    model.generation_config = sampling_defaults(tokenizer)
    return model


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Pillow's backend: no torchvision. Small images stay as they are."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        temporal_patch_size=1,
        merge_size=MERGE_SIZE,
        size={"shortest_edge": (PATCH_SIZE * MERGE_SIZE) ** 2, "longest_edge": 64**2},
    )


def _ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids([IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END])
    return ids


def _text(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # vLLM's CPU attention serves 32 and 64
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],  # time, height, width: half of head_dim in all
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def _vision() -> dict[str, object]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 1,
        "out_hidden_size": 64,
        "num_position_embeddings": POSITIONS_PER_SIDE**2,
        "deepstack_visual_indexes": [0],
        "dtype": "float32",
    }
