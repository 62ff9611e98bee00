"""Which vision-language models can be trained, and how.

    model_type    packed   why not
    qwen2_5_vl    yes
    qwen3_vl      yes      (its vision features also enter the first decoder layers)
    qwen3_5       no       linear attention carries its state over the borders of samples; one sample per micro batch

A model with a vision tower that is not in the table is refused at start-up: its positions and its way of taking image
features would have to be guessed. The packed column is not taken on trust, `trainer.oracle` measures it.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from trainer.errors import ModelUnusable
from trainer.images.spec import ImageSpec


@dataclass(frozen=True)
class ImageFamily:
    """What is true of all models of one `model_type`."""

    model_type: str
    why_unpacked: str | None = None
    """Why samples cannot share a row; `None`: they can."""
    has_deepstack: bool = False
    """Whether features of inner vision layers are added behind the first decoder layers."""


FAMILIES = (
    ImageFamily("qwen2_5_vl"),
    ImageFamily("qwen3_vl", has_deepstack=True),
    ImageFamily("qwen3_5", why_unpacked="its linear attention carries its state from one packed sample to the next"),
)


@dataclass(frozen=True)
class ImageModel:
    """The image side of the model that is trained."""

    family: ImageFamily
    spec: ImageSpec


def image_model_of(config: PretrainedConfig) -> ImageModel | None:
    """From a model's config; `None`: a model of text. Raises `ModelUnusable` for a family that is not in the table."""
    if not hasattr(config, "vision_config"):
        return None
    family = next((family for family in FAMILIES if family.model_type == config.model_type), None)
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ModelUnusable(
            f"{config.model_type} is a vision-language model that this trainer does not know how to train; it knows "
            f"{known}"
        )
    vision = config.vision_config
    patch_numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return ImageModel(family, ImageSpec(config.image_token_id, vision.spatial_merge_size, patch_numbers))
