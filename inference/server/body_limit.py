"""How large a request may be: pictures need more than tokens."""

from pathlib import Path

from inference.model_folder import sees_pictures

MAX_BODY_BYTES = 16 * 2**20
MAX_PICTURE_BODY_BYTES = 256 * 2**20
"""Ten pictures of a million pixels, as float32 patches of two frames."""


def max_body_bytes(model_path: Path) -> int:
    """The limit for requests to the model in this folder."""
    return MAX_PICTURE_BODY_BYTES if sees_pictures(model_path) else MAX_BODY_BYTES
