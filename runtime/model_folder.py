"""What a model folder says of itself, without a model library."""

import json
from pathlib import Path


def sees_pictures(folder: Path) -> bool:
    """Whether the model in `folder` has a vision tower."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # whoever loads the model says what is wrong with it
        return False
    return isinstance(config, dict) and "vision_config" in config
