"""`validate_multimodal_pack`: whether the model can be trained as the config asks, decided before the first batch."""

from trainer.errors import ModelUnusable
from trainer.images.family import ImageModel
from trainer.layout import RowSharing


def validate_multimodal_pack(images: ImageModel | None, *, pack_multimodal: bool, cp_size: int = 1) -> RowSharing:
    """How samples share micro batches. Raises `ModelUnusable` with the reason; nothing is switched off quietly.

    That the attention kernel keeps packed samples apart, images included, is measured by `trainer.oracle`.
    """
    if images is None:
        return RowSharing.TEXT
    name, why_unpacked = images.family.model_type, images.family.why_unpacked
    if cp_size > 1:
        raise ModelUnusable(
            f"{name} cannot be trained with context parallelism ({cp_size} ranks per sample): an image would be cut "
            "between ranks; use data parallel ranks only"
        )
    if pack_multimodal and why_unpacked:
        raise ModelUnusable(
            f"{name} cannot be trained with pack_multimodal: {why_unpacked}; set pack_multimodal = false to train it "
            "one sample per micro batch"
        )
    if why_unpacked:
        return RowSharing.NONE
    return RowSharing.ALL if pack_multimodal else RowSharing.MODALITY
