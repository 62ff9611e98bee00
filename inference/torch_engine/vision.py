"""`Vision`: prefill of rows with and without images, by a Qwen-VL model's own towers.

The vision tower runs once for every image of a batch that differs. Its features are put in by the modality of the
tokens, not by their ids as the model's own forward does: a sampled image token has no image. Rotary positions are
ours (`Images.positions`), because the model would have to guess rows and images apart.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from inference.api.images import Images
from inference.torch_engine.attention import AttentionBatch
from inference.vision_models import image_limits


class Vision:
    """The part of a vision model that a decode step does not need."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.limits = image_limits(model.config)

    def forward(self, tokens: Tensor, images: Sequence[Images | None], slots: AttentionBatch) -> Tensor:
        """Hidden states `[B, T, H]` of `tokens[B, T]`; `images[i]` are those of row `i`."""
        length = tokens.shape[1]
        embeddings = self._model.get_input_embeddings()(tokens)
        deepstack: dict[str, object] = {}
        if any(images):
            mask = self._mask(images, length).to(tokens.device)
            features = self._features([of_row for of_row in images if of_row is not None])
            embeddings[mask] = torch.cat(features.pooler_output).to(embeddings.dtype)
            if "deepstack_features" in features:
                layers = [torch.cat(layer) for layer in features.deepstack_features]
                deepstack = {"visual_pos_masks": mask, "deepstack_visual_embeds": layers}
        output = self._model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=self._positions(images, length).to(tokens.device),
            use_cache=False,
            slots=slots,
            **deepstack,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _mask(self, images: Sequence[Images | None], length: int) -> Tensor:
        """bool[B, T]: true where a token stands for a part of an image."""
        mask = np.zeros((len(images), length), np.bool_)
        for row, of_row in zip(mask, images, strict=True):
            if of_row is not None:
                types = of_row.token_types[:length]
                row[: len(types)] = types == 1
        return torch.from_numpy(mask)

    def _positions(self, images: Sequence[Images | None], length: int) -> Tensor:
        """int64[3, B, T]."""
        text = np.broadcast_to(np.arange(length), (3, length))
        rows = [text if of_row is None else of_row.positions(length) for of_row in images]
        return torch.from_numpy(np.stack(rows, axis=1))

    def _features(self, images: Sequence[Images]) -> BaseModelOutputWithPooling:
        """What the vision tower makes of all images, in the order of the rows; equal ones are computed once."""
        unique = {of_row.digest: of_row for of_row in images}
        starts = dict(
            zip(unique, np.cumsum([0, *(len(each.grids) for each in unique.values())]).tolist(), strict=False)
        )
        order = [starts[of_row.digest] + i for of_row in images for i in range(len(of_row.grids))]
        device = self._model.device
        output = self._model.model.get_image_features(
            torch.from_numpy(np.concatenate([each.pixel_values for each in unique.values()])).to(device),
            torch.from_numpy(np.concatenate([each.grids for each in unique.values()])).to(device),
            return_dict=True,
        )
        output.pooler_output = [output.pooler_output[index] for index in order]
        if "deepstack_features" in output:
            output.deepstack_features = [[layer[index] for index in order] for layer in output.deepstack_features]
        return output
