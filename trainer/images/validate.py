"""`validate_multimodal_pack`: whether the model can be trained as the config asks, decided before the first batch."""

from trainer.errors import ModelUnusable
from trainer.images.family import ImageModel
from trainer.layout import RowSharing


def validate_multimodal_pack(images: ImageModel | None, *, pack_multimodal: bool, cp_size: int = 1) -> RowSharing:
    """How samples share micro batches. Raises `ModelUnusable` with the reason; nothing is switched off quietly.

    A model that is not in the table of families, or whose layers would mix packed samples, was refused when it was
    loaded. That model and attention kernel keep samples apart, images included, is measured by `trainer.oracle`.
    """
    if images is None:
        return RowSharing.TEXT
    if cp_size > 1:
        raise ModelUnusable(
            f"{images.family.model_type} cannot be trained with context parallelism ({cp_size} ranks per sample): an "
            "image would be cut between ranks; use data parallel ranks only"
        )
    return RowSharing.ALL if pack_multimodal else RowSharing.MODALITY
