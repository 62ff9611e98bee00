"""Images and model folders for tests of the image path. No torch."""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.chat.model_folders import character_tokenizer, write_folder

VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def draw(seed: int, width: int = 16, height: int = 16, mode: str = "RGB") -> Image.Image:
    """Noise: every pixel matters."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze() if channels == 1 else values, mode=None)


def data_url(image: Image.Image, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, format=form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def user(*parts: str) -> dict[str, object]:
    """A message; parts that are data URLs are images."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def vision_tokenizer() -> Tokenizer:
    core = character_tokenizer()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in VISION])
    return core


def vision_folder(folder: Path, **changes: object) -> Path:
    """A folder as the orchestrator reads it: no weights. `changes` are of the image processor."""
    core = vision_tokenizer()
    write_folder(folder, core, TEMPLATE)
    ids = {"image_token_id": core.token_to_id("<|image_pad|>"), "video_token_id": core.token_to_id("<|video_pad|>")}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}, **ids}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    return folder
