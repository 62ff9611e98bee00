"""The trainer's step beside a minimal loop around a Hugging Face model: tokens per second on the same samples.

    python -m benchmarks.trainer

Both train the same model on the same samples with the same loss (`dppo`), denominators, clipping and AdamW, one thread,
in one process, in turns; the losses of the first step must agree. The loop is what one writes first: micro batches of
`ROWS` samples in order of arrival, padded to the longest of them, transformers' own sdpa attention, log_softmax over
all logits. Ours includes planning and packing. Tokens are those of samples, padding never counts. Times are CPU
seconds, best of several steps.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import harness
from trainer.batches.fake import ENV_NAME, FakeSource
from trainer.config.loss import DppoLossConfig
from trainer.config.model import ModelConfig, OptimizerConfig
from trainer.config.trainer import FakeDataConfig
from trainer.losses.factory import make_loss
from trainer.model.policy import load_policy
from trainer.optimizer import make_optimizer
from trainer.planning.layout import Layout
from trainer.planning.pack import pack_mini_batch
from trainer.planning.plan import plan_step
from trainer.step.step import StepSettings, train_mini_batch
from transport.wire.codec import build_batch
from transport.wire.sample import TrainingSample

SEQ_LEN = 1024
ROWS = 8
"""Samples in a micro batch of the loop."""
REPEATS = 3
DATA = {
    "equal lengths": FakeDataConfig(batch_size=32, lengths="fixed", mean_tokens=128),
    "lognormal lengths": FakeDataConfig(batch_size=32, lengths="lognormal", mean_tokens=128),
}
MODEL = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 8192,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": True,
}
OPTIMIZER = OptimizerConfig(lr=1e-5)
Step = Callable[[], float]
"""One optimizer step; its loss."""


def make_samples(data: FakeDataConfig) -> list[TrainingSample]:
    """One batch."""
    source = FakeSource(data, "bench", seq_len=SEQ_LEN, vocab_size=int(MODEL["vocab_size"]), seed=0)
    return list(source.samples(source.manifest(1), range(data.batch_size)))


def our_step(path: Path, samples: list[TrainingSample]) -> Step:
    """Plan, pack, train."""
    device = torch.device("cpu")
    policy = load_policy(ModelConfig(path=path, seq_len=SEQ_LEN), device)
    optimizer = make_optimizer(policy.causal_lm, OPTIMIZER)
    manifest = build_batch("bench", 1, samples).manifest
    layout, loss = Layout(0, 1, SEQ_LEN, SEQ_LEN), make_loss(DppoLossConfig())
    settings = StepSettings((ENV_NAME,), OPTIMIZER.max_grad_norm, SEQ_LEN)

    def step() -> float:
        plan = plan_step(manifest, layout)
        batches = pack_mini_batch(plan, 0, 0, dict(enumerate(samples)))
        return train_mini_batch(policy, optimizer, batches, loss, settings).metrics["loss"]

    return step


def loop_step(path: Path, samples: list[TrainingSample]) -> Step:
    """The loop that one writes first."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, weight_decay=OPTIMIZER.weight_decay
    )
    num_trained = sum(sample.num_loss_tokens for sample in samples)
    batches = [samples[start : start + ROWS] for start in range(0, len(samples), ROWS)]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = padded_loss(model, batch) / num_trained
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        return total

    return step


def padded_loss(model: PreTrainedModel, batch: list[TrainingSample]) -> Tensor:
    """Sum of the losses of the trained tokens of a padded micro batch."""
    longest = max(sample.num_tokens for sample in batch)

    def padded(columns: "list[np.ndarray[tuple[int], np.dtype[np.generic]]]") -> Tensor:
        return torch.from_numpy(np.stack([np.pad(column, (0, longest - len(column))) for column in columns]))

    token_ids = padded([sample.token_ids.numpy() for sample in batch]).long()
    mask = padded([sample.loss_mask.numpy() for sample in batch])[:, 1:]
    old = padded([sample.logprobs.numpy() for sample in batch])[:, 1:]
    lengths = torch.tensor([sample.num_tokens for sample in batch])
    attention_mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    same_length = bool((lengths == longest).all())
    logits = model(token_ids, attention_mask=None if same_length else attention_mask, use_cache=False).logits
    new = logits[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
    advantages = torch.tensor([float(sample.advantages) for sample in batch])[:, None]  # type: ignore[arg-type]
    moved = (new.exp() - old.exp()).detach()
    masked = ((advantages > 0) & (moved > 0.2)) | ((advantages < 0) & (moved < -0.2))
    losses = torch.where(masked, 0.0, -advantages * (new - old).exp()) + 1e-3 * (new - old).square()
    return losses[mask].sum()


def compare(path: Path, data: FakeDataConfig) -> dict[str, float]:
    """Tokens per CPU second of both."""
    samples = make_samples(data)
    num_tokens = sum(sample.num_tokens for sample in samples)
    steps = {"trainer": our_step(path, samples), "loop": loop_step(path, samples)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for _ in range(REPEATS + 1):
        for name, step in steps.items():
            started = time.process_time()
            loss = step()
            times[name].append(time.process_time() - started)
            losses.setdefault(name, loss)
    assert abs(losses["trainer"] - losses["loop"]) < 1e-4, f"not the same loss: {losses}"
    rates = {name: num_tokens / min(taken[1:]) for name, taken in times.items()}
    padded_to = sum(
        ROWS * max(sample.num_tokens for sample in samples[start : start + ROWS])
        for start in range(0, len(samples), ROWS)
    )
    return {
        "trainer_tokens_per_s": round(rates["trainer"], 1),
        "loop_tokens_per_s": round(rates["loop"], 1),
        "ratio": round(rates["trainer"] / rates["loop"], 2),
        "tokens": num_tokens,
        "padded_tokens": padded_to,
    }


def measure() -> dict[str, object]:
    """Both kinds of data, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(path)
        return {"results": {name: compare(path, data) for name, data in DATA.items()}}


if __name__ == "__main__":
    harness.main("trainer", __doc__, measure)
