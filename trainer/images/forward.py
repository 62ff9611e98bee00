"""The forward pass of a packed row with images, made of the public parts of a transformers vision-language model.

The model's own forward would look for the image token in the row and compute positions over all of it: a sample that
holds the token by accident takes its neighbour's features, and images of two samples that touch count as one. Here the
features go where `ImageInputs.token_index` says, and positions were made for each sample alone.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.attention.segments import SegmentInfo
from trainer.images.family import ImageFamily
from trainer.images.inputs import ImageInputs


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
