"""From a Hugging Face folder to a model that this engine can serve exactly, or a clear refusal."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from inference.config import ModelConfig
from inference.generation import Int32s
from inference.torch_engine.attention import ATTENTION_NAME, register
from inference.torch_engine.prefill_plan import pad_right
from inference.torch_engine.slot_model import SlotModel
from runtime.errors import UserError

_PROBE_LENGTH = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a log probability that rounding explains; a model that our attention cannot run is far off."""


def load_slot_model(config: ModelConfig, num_slots: int, max_length: int) -> SlotModel:
    """Load, move to the device, and prove that slot attention gives the model's own logits. Raises `UserError`."""
    device = choose_device(config.device)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.path, dtype=getattr(torch, config.dtype), attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load the model in {config.path}: {error}") from error
    model = model.to(device).eval()
    check_positions(model, config.path, max_length)
    return _with_slot_attention(model, num_slots, max_length, config.path)


def choose_device(name: str) -> torch.device:
    """The device for `--model.device`. Raises `UserError` if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.zeros(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--model.device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_positions(model: PreTrainedModel, path: Path, max_length: int) -> None:
    """Raise `UserError` if sequences of `max_length` tokens would be served wrongly."""
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise UserError(f"--torch.max-model-len {max_length} is above the {limit} positions of the model in {path}")


def eos_token_ids(path: Path) -> frozenset[int]:
    """The ids that end a generation: of `generation_config.json`, else of `config.json`."""
    for load in (GenerationConfig.from_pretrained, AutoConfig.from_pretrained):
        try:
            ids = load(path, local_files_only=True).eos_token_id
        except OSError:  # the folder has no such file
            continue
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


@torch.inference_mode()
def _with_slot_attention(model: PreTrainedModel, num_slots: int, max_length: int, path: Path) -> SlotModel:
    """Switch to slot attention, and compare with the model's own attention on a probe: a model whose layers do not go
    through the attention registry, or keep other state, must fail here and not in training data."""
    rows = _probe(model.config.get_text_config().vocab_size, min(_PROBE_LENGTH, max_length), num_slots)
    expected = torch.log_softmax(
        model(torch.from_numpy(rows).to(model.device), use_cache=False).logits[:, -1].float(), -1
    )
    register()
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        slots = SlotModel(model, num_slots, max_length)
        slots.prefill({slot: row[:-1] for slot, row in enumerate(rows)})
        logits = slots.decode(rows[:, -1], np.full(len(rows), rows.shape[1] - 1))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the torch engine cannot serve {type(model).__name__} in {path}: {error}") from error
    difference = float((torch.log_softmax(logits.float(), -1) - expected).abs().max())
    if not difference <= _TOLERANCE[model.dtype]:
        raise UserError(
            f"the torch engine cannot serve {type(model).__name__} in {path}: its log probabilities differ by "
            f"{difference:.2g} from the model's own"
        )
    return slots


def _probe(vocab_size: int, length: int, num_slots: int) -> Int32s:
    """Two different rows of valid tokens (one, if there is one slot)."""
    rows = [[(7 * row + 3 * i + 1) % vocab_size for i in range(length)] for row in range(min(2, num_slots))]
    return pad_right([torch.tensor(row, dtype=torch.int32).numpy() for row in rows])
