"""Time of a weight update by channel and phase, against the plain way: gather everything, `save_file`, `load_file`.

    python -m benchmarks.weights [--updates 5]

A trainer process (one rank) publishes; an embedded engine in this process takes the version as it does in a run:
`publish` is the trainer's time, `transfer` until every hash is checked, `pause` until nothing is decoded, `apply` until
the model has it and was read back. Qwen3 of two sizes, float32, CPU, one thread each; medians of the wall clock, the
first update left out. The machine is shared: read ratios.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks import harness
from inference.api.engine import EngineLimits
from inference.config import ServedModelConfig
from inference.torch_engine.decoder import Decoder
from inference.torch_engine.engine import TorchEngine
from inference.torch_engine.loading import load_slot_model
from inference.weights.receiver import WeightReceiver
from trainer.config.trainer import WeightsConfig
from trainer.ranks import Ranks
from trainer.weights.channel import open_channel
from trainer.weights.local_ranges import named_weights

RUN = "bench"
CHANNELS = ("filesystem", "zmq", "collective")
BASELINE = "gather_and_save_file"
SIZES = {"tiny": (64, 2, 48), "23M": (512, 8, 8192)}
"""Hidden size, layers, vocabulary."""
PHASES = ("publish", "transfer", "pause", "apply")
TIMEOUT_S = 120.0


def make_model(hidden: int, layers: int, vocab: int) -> PreTrainedModel:
    """Random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def serve(channel: str, folder: Path) -> None:
    """The trainer: a line with a version on stdin publishes it; the answer is a line of JSON."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    weights = folder / channel
    weights.mkdir()
    publisher = open_channel(
        WeightsConfig() if channel == BASELINE else WeightsConfig(channel=channel),  # type: ignore[arg-type]
        weights,
        RUN,
        Ranks(0, 1, torch.device("cpu")),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        version = int(line)
        with torch.no_grad():
            model.model.norm.weight.fill_(1 + version / 1024)
        started = time.monotonic()
        if channel == BASELINE:
            path = weights / f"v{version}.safetensors"
            gathered = {name: tensor.clone() for name, tensor in named_weights(model).items()}
            safetensors.torch.save_file(gathered, path)
            location = str(path)
        else:
            location = publisher.publish(model, version).location
        print(json.dumps({"location": location, "publish": time.monotonic() - started}), flush=True)
    publisher.close()


@contextmanager
def trainer(channel: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A trainer process that is ready to publish."""
    command = [sys.executable, "-m", "benchmarks.weights", "serve", channel, str(folder)]
    with subprocess.Popen(
        command, cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def publish(process: "subprocess.Popen[str]", version: int) -> tuple[str, float]:
    """Where the version is, and the seconds that the trainer spent."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{version}\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    return answer["location"], answer["publish"]


async def update(channel: str, folder: Path, updates: int) -> dict[str, float]:
    """Median seconds of each phase."""
    slots = load_slot_model(ServedModelConfig(path=folder / "model", device="cpu"), 8, 256)
    limits = EngineLimits(slots.hf.get_input_embeddings().num_embeddings, 256, 8, 64)
    engine = TorchEngine(
        Decoder(slots, 8, 256), limits, eos_token_ids=frozenset(), seed=0, receiver=WeightReceiver(RUN)
    )
    rows: list[dict[str, float]] = []
    try:
        with trainer(channel, folder) as process:
            for version in range(1, updates + 2):
                location, publish_s = await asyncio.to_thread(publish, process, version)
                if channel == BASELINE:
                    took = await apply_plainly(slots.hf, location)
                else:
                    took = await apply(engine, location, version)
                rows.append({"publish": publish_s, **took})
    finally:
        await engine.stop(grace_s=1)
    medians = {phase: statistics.median(row[phase] for row in rows[1:]) for phase in PHASES}
    return medians | {"total": sum(medians.values())}


async def apply(engine: TorchEngine, location: str, version: int) -> dict[str, float]:
    """As in a run."""
    async with asyncio.timeout(TIMEOUT_S):
        await engine.apply_weights(location, version)
    times = engine.last_update
    assert times is not None
    return {"transfer": times.transfer_s, "pause": times.pause_s, "apply": times.apply_s}


async def apply_plainly(model: PreTrainedModel, path: str) -> dict[str, float]:
    """`load_file` and a copy: no hash, no read-back."""
    started = time.monotonic()
    tensors = await asyncio.to_thread(safetensors.torch.load_file, path)
    loaded = time.monotonic()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in tensors:
                tensor.copy_(tensors[name])
    return {"transfer": loaded - started, "pause": 0.0, "apply": time.monotonic() - loaded}


def measure(updates: int) -> dict[str, object]:
    """All sizes, all channels."""
    results: dict[str, object] = {}
    for size, shape in SIZES.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_model(*shape)
            model.save_pretrained(folder / "model")
            num_bytes = sum(tensor.nbytes for tensor in named_weights(model).values())
            rows = {way: asyncio.run(update(way, folder, updates)) for way in (BASELINE, *CHANNELS)}
            ratios = {way: rows[way]["total"] / rows[BASELINE]["total"] for way in CHANNELS}
            rounded = {way: {phase: round(value, 5) for phase, value in row.items()} for way, row in rows.items()}
            results[size] = {
                "num_bytes": num_bytes,
                "seconds": rounded,
                "total_over_baseline": {way: round(ratio, 2) for way, ratio in ratios.items()},
            }
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    match sys.argv[1:]:
        case ["serve", channel, folder]:
            serve(channel, Path(folder))
        case _:
            harness.main("weights", __doc__, measure, updates=5)
