"""Which vision-language models can be trained, and how.

    qwen2_5_vl
    qwen3_vl      its vision features also enter the first decoder layers
    qwen3_5       has layers of linear attention, which we end with each sample (trainer/model/delta_net.py)

A model with a vision tower that is not in the table is refused at start-up: its positions and its way of taking image
features would have to be guessed. That all of these can be packed is measured at start-up (`trainer.checks.packing`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from trainer.errors import ModelUnusable
from trainer.images.inputs import ImageInputs
from trainer.images.spec import ImageSpec
from trainer.planning.layout import RowSharing
from trainer.planning.pack import SegmentInfo


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
    images included, is measured by `trainer.checks.packing`.
    """
    if images is None:
        return RowSharing.TEXT
    return RowSharing.ALL if pack_multimodal else RowSharing.MODALITY


def hidden_with_images(
    base_model: PreTrainedModel,
    family: ImageFamily,
    token_ids: Tensor,
    position_ids: Tensor,
    images: ImageInputs,
    segments: SegmentInfo,
) -> Tensor:
    """[1, T, H]: last hidden states of the row."""
    seen = base_model.get_image_features(images.pixel_values, images.grids, return_dict=True)
    embeddings = base_model.get_input_embeddings()(token_ids)
    features = torch.cat(list(seen.pooler_output)).to(embeddings.dtype)
    embeddings = embeddings.index_copy(0, images.token_index, features)
    extras: dict[str, Tensor | list[Tensor]] = {}
    if family.has_deepstack:
        mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.token_index, True)
        extras = {
            "visual_pos_masks": mask[None],
            "deepstack_visual_embeds": [torch.cat(list(parts)) for parts in seen.deepstack_features],
        }
    output = base_model.language_model(
        inputs_embeds=embeddings[None],
        # The row of text positions comes first; with three rows the model would take the first for time.
        position_ids=torch.cat((position_ids[None], images.positions))[:, None],
        use_cache=False,
        segments=segments,
        **extras,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
