"""The vision models that both engines serve, and what images must be for them."""

from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from inference.api.images import ImageLimits

VISION_MODELS = (Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration)


VISION_MODEL_TYPES = frozenset(model.config_class.model_type for model in VISION_MODELS)
"""Values of `model_type` in `config.json`."""


def image_limits(config: PretrainedConfig) -> ImageLimits:
    """What images must be for a Qwen-VL model of this config."""
    vision = config.vision_config
    return ImageLimits(
        image_token_id=config.image_token_id,
        media_token_ids=frozenset({config.image_token_id, config.video_token_id}),
        merge_size=vision.spatial_merge_size,
        num_patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
    )


def has_vision(model: PreTrainedModel) -> bool:
    """Whether `Vision` serves this model."""
    return type(model) in VISION_MODELS
