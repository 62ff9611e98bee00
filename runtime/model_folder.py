"""What a model folder says of itself, without a model library."""

import json
from pathlib import Path


def sees_images(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower, as far as its config says."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # whoever loads the model says what is wrong with it
        return False
    return isinstance(config, dict) and "vision_config" in config
