"""Tiny random models made on the spot, a tokenizer for them, and publishes of their weights."""

import string
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inference.weights.publish import dtype_name, served_tensors, tensor_hash
from transport.wire.weights import ShardEntry, TensorEntry, WeightManifest, version_dir, weights_digest

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]
CHARACTERS = string.ascii_lowercase + string.digits + " .,!?:"
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
PAD, BOS, EOS = 0, 1, 2
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.15,
}


NO_SPECIAL: dict[str, object] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
"""No token ends a sequence, and none has an embedding of zeros."""


def make_model(seed: int = 0, *, family: str = "qwen3", tied: bool = True, **changes: object) -> PreTrainedModel:
    """A random model of two layers. Its distributions are not flat, so that samples and differences mean something."""
    torch.manual_seed(seed)
    settings = {**_SIZES, "tie_word_embeddings": tied, **changes}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**settings)).eval()


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """A Hugging Face folder with model and tokenizer."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and a chat template."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    fast.chat_template = _TEMPLATE
    return fast


def publish(root: Path, model: PreTrainedModel, version: int, *, run_id: str = "default", num_shards: int = 2) -> Path:
    """Write `model` as policy `version` the way a trainer does; returns the path of the manifest."""
    folder = version_dir(root, version)
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in served_tensors(model)}
    entries: list[TensorEntry] = []
    shards: list[ShardEntry] = []
    for index in range(num_shards):
        file = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[index::num_shards])
        save_file(part, folder / file)
        data = (folder / file).read_bytes()
        shards.append(ShardEntry(file=file, num_bytes=len(data)))
        entries += [_entry(name, tensor, file) for name, tensor in part.items()]
    digest = weights_digest((entry.name, entry.dtype, entry.shape, entry.hash) for entry in entries)
    manifest = WeightManifest(
        run_id=run_id, version=version, tensors=tuple(entries), shards=tuple(shards), digest=digest
    )
    return write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: WeightManifest) -> Path:
    """Write `manifest.json`."""
    path = folder / "manifest.json"
    path.write_bytes(msgspec.json.encode(manifest))
    return path


def _entry(name: str, tensor: torch.Tensor, file: str) -> TensorEntry:
    return TensorEntry(
        name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), shard=file, hash=tensor_hash(tensor)
    )  # type: ignore[arg-type]


@torch.inference_mode()
def score(model: PreTrainedModel, prompt: "list[int]", sampled: "list[int]", temperature: float = 1.0) -> torch.Tensor:
    """Log probabilities of `sampled` after `prompt`, by a plain forward of the whole sequence."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
