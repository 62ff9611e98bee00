"""Tokens per second of the torch engine beside Hugging Face `generate`, same model, same batch, same run.

    python -m benchmarks.engines

Tiny Qwen3 (hidden 64, 2 layers, 4 heads, vocabulary 48), prompts of 34 tokens, 128 sampled tokens each, one thread.
The engine returns exact log probabilities; `hf_generate` returns tokens only, `hf_generate_logprobs` also computes
them, as reinforcement learning needs. `varied` asks for 16 to 128 tokens: continuous batching lets the short ones go.
Figures are sampled tokens per CPU second (the machine may be shared), best of several interleaved repeats.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import harness
from inference.api.engine import EngineLimits
from inference.api.generation import Job
from inference.config import ServedModelConfig
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import load_slot_model
from inference.weights.receiver import WeightReceiver

BATCHES = (1, 32, 128)
PROMPT_TOKENS, NEW_TOKENS, VOCAB_SIZE = 34, 128, 48
MAX_LENGTH = PROMPT_TOKENS + NEW_TOKENS
REPEATS = 4


@dataclass(frozen=True)
class Load:
    """`prompts` (int64[N, T]) and how many tokens to sample after each."""

    name: str
    prompts: torch.Tensor
    num_new: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)


def make_loads() -> list[Load]:
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCAB_SIZE, (max(BATCHES), PROMPT_TOKENS), generator=random)
    loads = [Load(f"n{num}", prompts[:num], [NEW_TOKENS] * num) for num in BATCHES]
    varied = np.linspace(16, NEW_TOKENS, max(BATCHES)).astype(int).tolist()
    return [*loads, Load(f"n{max(BATCHES)}_varied", prompts, varied)]


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def run_hf(model: PreTrainedModel, load: Load, *, logprobs: bool) -> None:
    """All rows run to the longest; log probabilities are gathered from the returned logits."""
    output = model.generate(
        load.prompts,
        attention_mask=torch.ones_like(load.prompts),
        max_new_tokens=max(load.num_new),
        do_sample=True,
        top_k=0,
        output_logits=logprobs,
        return_dict_in_generate=True,
    )
    if logprobs:
        sampled = output.sequences[:, PROMPT_TOKENS:]
        for step, logits in enumerate(output.logits):
            torch.log_softmax(logits.float(), dim=-1).gather(1, sampled[:, step, None])


def make_engine(folder: Path) -> TorchEngine:
    slots = max(BATCHES)
    decoder = Decoder(
        load_slot_model(ServedModelConfig(path=folder, device="cpu"), slots, MAX_LENGTH), slots, MAX_LENGTH
    )
    limits = EngineLimits(VOCAB_SIZE, MAX_LENGTH, slots, max_waiting=slots)
    return TorchEngine(decoder, limits, eos_token_ids=frozenset(), seed=0, receiver=WeightReceiver("bench"))


async def run_engine(engine: TorchEngine, load: Load) -> None:
    jobs = [
        Job(prompt=row, max_tokens=num)
        for row, num in zip(load.prompts.numpy().astype(np.int32), load.num_new, strict=True)
    ]
    completions = await asyncio.gather(*(engine.generate(job) for job in jobs))
    assert sum(len(completion.token_ids) for completion in completions) == load.num_tokens


async def compare(folder: Path, model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Tokens per CPU second by load and contestant; the contestants take turns."""
    engine = make_engine(folder)
    results = {}
    for load in make_loads():
        best: dict[str, float] = {}
        for _ in range(REPEATS):
            started = time.process_time()
            await run_engine(engine, load)
            keep_best(best, "torch_engine", load, started)
            for name, logprobs in (("hf_generate", False), ("hf_generate_logprobs", True)):
                started = time.process_time()
                run_hf(model, load, logprobs=logprobs)
                keep_best(best, name, load, started)
        results[load.name] = best | {"ratio": round(best["torch_engine"] / best["hf_generate"], 2)}
    await engine.stop(grace_s=5)
    return results


def keep_best(best: dict[str, float], name: str, load: Load, started: float) -> None:
    best[name] = max(best.get(name, 0.0), round(load.num_tokens / (time.process_time() - started), 1))


def measure() -> dict[str, object]:
    """All loads, with a model of our own."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {"unit": "sampled tokens per CPU second", "results": asyncio.run(compare(Path(folder), model))}


if __name__ == "__main__":
    harness.main("engines", __doc__, measure)
