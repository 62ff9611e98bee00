"""From a Hugging Face folder to an engine that serves it exactly, or a clear refusal.

Importing this module imports torch, which takes seconds: do it in a thread.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from inference.api.arrays import Int32s
from inference.api.chat_request import ChatTokenizer
from inference.api.engine import EngineLimits
from inference.api.images import Images
from inference.config import InferenceConfig, ServedModelConfig
from inference.torch_engine.attention import ATTENTION_NAME, register_attention
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.slots import SlotModel, pad_right
from inference.torch_engine.vision import Vision
from inference.vision_models import VISION_MODELS, has_vision
from inference.weights.receiver import WeightReceiver, fetch_settings
from runtime.base.files import sees_images
from runtime.errors import UserError


def image_probe(model: PreTrainedModel) -> tuple[Int32s, Images]:
    """Some text, an image of two tokens side by side, some more text: rows, columns and offset all matter."""
    limits = Vision(model).limits
    merge = limits.merge_size
    patches = np.linspace(-1, 1, 2 * merge**2 * limits.num_patch_values, dtype=np.float32)
    image = limits.image_token_id
    text = [token for token in range(8) if token not in limits.media_token_ids]
    tokens = np.array([*text[:2], image, image, *text[2:4]], np.int32)
    types = (tokens == image).astype(np.uint8)
    pixels = patches.reshape(-1, limits.num_patch_values)
    return tokens, Images(pixels, np.array([[1, merge, 2 * merge]]), types, merge, b"probe")


def own_logits(model: PreTrainedModel, tokens: Int32s, images: Images) -> Tensor:
    """Logits `[1, V]` of the next token, positions and all by the model's own forward."""
    output = model(
        input_ids=torch.from_numpy(tokens[None].astype(np.int64)).to(model.device),
        mm_token_type_ids=torch.from_numpy(images.token_types[None].astype(np.int64)).to(model.device),
        pixel_values=torch.from_numpy(images.pixel_values).to(model.device),
        image_grid_thw=torch.from_numpy(images.grids).to(model.device),
        use_cache=False,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def slot_logits(slots: SlotModel, tokens: Int32s, images: Images) -> Tensor:
    """The same, by prefill and one decode step in slot 0."""
    slots.prefill({0: tokens[:-1]}, {0: images})
    return slots.decode(tokens[-1:], np.array([len(tokens) - 1]), np.array([images.rotary_offset]))


_PROBE_LENGTH = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a log probability that rounding explains; a model that our attention cannot run is far off."""


def load_slot_model(config: ServedModelConfig, num_slots: int, max_length: int) -> SlotModel:
    """Load, move to the device, and prove that slot attention gives the model's own logits. Raises `UserError`."""
    device = choose_device(config.device)
    try:
        model = _load(config)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load the model in {config.path}: {error}") from error
    check_vision_model(model, config.path)
    model = model.to(device).eval()
    check_max_length(model, config.path, max_length)
    return _with_slot_attention(model, num_slots, max_length, config.path)


def _load(config: ServedModelConfig) -> PreTrainedModel:
    """transformers does not count a vision model among the causal LMs."""
    kind = AutoModelForImageTextToText if sees_images(config.path) else AutoModelForCausalLM
    return kind.from_pretrained(
        config.path, dtype=getattr(torch, config.dtype), attn_implementation="eager", local_files_only=True
    )


def check_vision_model(model: PreTrainedModel, path: Path) -> None:
    """Raise `UserError` for a vision model whose images this engine would place wrongly."""
    if "vision_config" in model.config.sub_configs and not has_vision(model):
        raise UserError(
            f"the torch engine cannot serve {type(model).__name__} in {path}: of the models that see it serves "
            + ", ".join(kind.__name__ for kind in VISION_MODELS)
        )


def choose_device(name: str) -> torch.device:
    """The device for `--model.device`. Raises `UserError` if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--model.device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_max_length(model: PreTrainedModel, path: Path, max_length: int) -> None:
    """Raise `UserError` if sequences of `max_length` tokens would be served wrongly."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise UserError(f"--torch.max-model-len {max_length} is above the {limit} positions of the model in {path}")


def eos_token_ids(path: Path) -> frozenset[int]:
    """The ids that end a generation: of `generation_config.json`, else of `config.json`."""
    try:
        ids = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    except OSError:  # the folder has no such file
        ids = None
    if ids is None:  # of a vision model the part that writes has it
        ids = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


@torch.inference_mode()
def _with_slot_attention(model: PreTrainedModel, num_slots: int, max_length: int, path: Path) -> SlotModel:
    """Switch to slot attention, and compare with the model's own attention on a probe: a model whose layers do not go
    through the attention registry, or keep other state, must fail here and not in training data."""
    rows = _probe(model.config.get_text_config().vocab_size, min(_PROBE_LENGTH, max_length), num_slots)
    probe = image_probe(model) if has_vision(model) and max_length >= _PROBE_LENGTH else None
    expected = [model(torch.from_numpy(rows).to(model.device), use_cache=False).logits[:, -1]]
    expected += [] if probe is None else [own_logits(model, *probe)]
    register_attention()
    try:
        # The vision tower keeps its own attention: it is not causal, and nothing of it is cached.
        model.set_attn_implementation({"text_config": ATTENTION_NAME} if has_vision(model) else ATTENTION_NAME)
        slots = SlotModel(model, num_slots, max_length)
        slots.prefill({slot: row[:-1] for slot, row in enumerate(rows)})
        logits = [slots.decode(rows[:, -1], np.full(len(rows), rows.shape[1] - 1))]
        logits += [] if probe is None else [slot_logits(slots, *probe)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the torch engine cannot serve {type(model).__name__} in {path}: {error}") from error
    difference = max(map(_difference, logits, expected))
    if not difference <= _TOLERANCE[model.dtype]:
        raise UserError(
            f"the torch engine cannot serve {type(model).__name__} in {path}: its log probabilities differ by "
            f"{difference:.2g} from the model's own"
        )
    return slots


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of a log probability; NaN if there is one."""
    return float((torch.log_softmax(logits.float(), -1) - torch.log_softmax(expected.float(), -1)).abs().max())


def _probe(vocab_size: int, length: int, num_slots: int) -> Int32s:
    """Two different rows of valid tokens (one, if there is one slot)."""
    rows = [[(7 * row + 3 * i + 1) % vocab_size for i in range(length)] for row in range(min(2, num_slots))]
    return pad_right([torch.tensor(row, dtype=torch.int32).numpy() for row in rows])


StartEngine = Callable[[Callable[[], None]], tuple[TorchEngine, ChatTokenizer]]


def load_engine(config: InferenceConfig) -> StartEngine:
    """Load model and tokenizer; the result starts the engine in the event loop that calls it, with a function that
    the engine calls whenever it makes progress. Raises `UserError`."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(config.torch.num_threads)
    model = load_slot_model(config.model, config.torch.max_batch_size, config.torch.max_model_len)
    tokenizer = load_tokenizer(config)
    limits = EngineLimits(
        vocab_size=model.hf.get_input_embeddings().num_embeddings,
        max_model_len=config.torch.max_model_len,
        max_batch_size=config.torch.max_batch_size,
        images=None if model.vision is None else model.vision.limits,
    )
    decoder = Decoder(model, limits.max_batch_size, limits.max_model_len)
    eos = eos_token_ids(config.model.path)
    receiver = WeightReceiver(config.run.name, fetch_settings(config.weights), model.hf.device)

    def start(on_progress: Callable[[], None]) -> tuple[TorchEngine, ChatTokenizer]:
        engine = TorchEngine(
            decoder, limits, eos_token_ids=eos, seed=config.seed, receiver=receiver, on_progress=on_progress
        )
        return engine, tokenizer

    return start


def load_tokenizer(config: InferenceConfig) -> ChatTokenizer:
    """The tokenizer of the model's folder. Without one, all but the chat route works."""
    path = config.model.path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        return ChatTokenizer(None, missing=f"there is no tokenizer in {path}: {error}")
    return ChatTokenizer(tokenizer, missing="" if tokenizer.chat_template else f"{path} has no chat template")
