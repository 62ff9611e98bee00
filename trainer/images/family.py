"""Which vision-language models can be trained, and how.

    qwen2_5_vl
    qwen3_vl      its vision features also enter the first decoder layers
    qwen3_5       has layers of linear attention, which we end with each sample (trainer/attention/delta_net.py)

A model with a vision tower that is not in the table is refused at start-up: its positions and its way of taking image
features would have to be guessed. That all of these can be packed is not taken on trust, `trainer.oracle` measures it.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from trainer.errors import ModelUnusable
from trainer.images.spec import ImageSpec
from trainer.layout import RowSharing


@dataclass(frozen=True)
class ImageFamily:
    """What is true of all models of one `model_type`."""

    model_type: str
    has_deepstack: bool = False
    """Whether features of inner vision layers are added behind the first decoder layers."""


FAMILIES = (
    ImageFamily("qwen2_5_vl"),
    ImageFamily("qwen3_vl", has_deepstack=True),
    ImageFamily("qwen3_5"),
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


def validate_multimodal_pack(images: ImageModel | None, *, pack_multimodal: bool) -> RowSharing:
    """How samples share micro batches.

    A model that is not in the table of families, or whose layers would mix packed samples, was refused when it was
    loaded, and context parallelism with images by the config. That model and attention kernel keep samples apart,
    images included, is measured by `trainer.oracle`.
    """
    if images is None:
        return RowSharing.TEXT
    return RowSharing.ALL if pack_multimodal else RowSharing.MODALITY
