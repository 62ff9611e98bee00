"""The forward pass of a packed row with images, made of the public parts of a transformers vision-language model.

The model's own forward would look for the image token in the row and compute positions over all of it: a sample that
holds the token by accident takes its neighbour's features, and images of two samples that touch count as one. Here the
features go where `ImageInputs.token_index` says, and positions were made for each sample alone.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trainer.attention.segments import SegmentInfo
from trainer.images.family import ImageFamily
from trainer.images.inputs import ImageInputs


class _Features(Protocol):
    pooler_output: Sequence[Tensor]
    deepstack_features: Sequence[Sequence[Tensor]]


class _Hidden(Protocol):
    last_hidden_state: Tensor


class _LanguageModel(Protocol):
    def __call__(
        self,
        *,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        use_cache: bool,
        segments: SegmentInfo,
        **extras: Tensor | list[Tensor],
    ) -> _Hidden: ...


class _VisionLanguageModel(Protocol):
    """What the families have in common."""

    language_model: _LanguageModel

    def get_input_embeddings(self) -> nn.Embedding: ...

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, *, return_dict: bool) -> _Features: ...


def hidden_with_images(
    base_model: nn.Module,
    family: ImageFamily,
    token_ids: Tensor,
    position_ids: Tensor,
    images: ImageInputs,
    segments: SegmentInfo,
) -> Tensor:
    """[1, T, H]: last hidden states of the row."""
    model = cast(_VisionLanguageModel, base_model)
    seen = model.get_image_features(images.pixel_values, images.grids, return_dict=True)
    embeddings = model.get_input_embeddings()(token_ids)
    features = torch.cat(list(seen.pooler_output)).to(embeddings.dtype)
    embeddings = embeddings.index_copy(0, images.token_index, features)
    extras: dict[str, Tensor | list[Tensor]] = {}
    if family.has_deepstack:
        mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.token_index, True)
        extras = {
            "visual_pos_masks": mask[None],
            "deepstack_visual_embeds": [torch.cat(list(parts)) for parts in seen.deepstack_features],
        }
    output = model.language_model(
        inputs_embeds=embeddings[None],
        # The row of text positions comes first; with three rows the model would take the first for time.
        position_ids=torch.cat((position_ids[None], images.positions))[:, None],
        use_cache=False,
        segments=segments,
        **extras,
    )
    return output.last_hidden_state
