"""Both engines as the orchestrator meets them, over HTTP: tokens/s, time of a weight update, log probabilities.

    python benchmarks/engine_servers.py [--out benchmarks/results/engine_servers.json] [--engines torch vllm]

Tiny Qwen3 (hidden 64, 2 layers, heads of 32, vocabulary 48), prompts of 34 tokens, 128 sampled tokens each, float32,
one thread per process. Updates happen with 64 requests in flight. Log probabilities are compared with a plain forward
of the sampled sequences in Hugging Face's model, as the trainer runs it. vLLM is measured where it is installed.
Figures are wall clock, best of three: on a shared machine read ratios.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from inference.torch_engine.weights import dtype_name, served_tensors, tensor_hash
from transport.codec import encode
from transport.generation import GENERATE_PATH, WEIGHTS_PATH, ApplyWeights, GenerateReply, GenerateRequest
from transport.tensor import EncodedTensor
from transport.weights import ShardEntry, TensorEntry, WeightManifest, version_dir, weights_digest

BATCHES = (1, 32, 128)
PROMPT_TOKENS, NEW_TOKENS, VOCAB_SIZE = 34, 128, 48
REPEATS = 3
NUM_UPDATES = 5
START_S = 300.0


def make_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def publish(root: Path, model: PreTrainedModel, version: int) -> Path:
    folder = version_dir(root, version)
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().clone() for name, tensor in served_tensors(model)}
    file = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / file)
    data = (folder / file).read_bytes()
    entries = tuple(
        TensorEntry(name=name, dtype=dtype_name(t), shape=tuple(t.shape), shard=file, hash=tensor_hash(t))  # type: ignore[arg-type]
        for name, t in tensors.items()
    )
    manifest = WeightManifest(
        run_id="bench",
        version=version,
        tensors=entries,
        shards=(ShardEntry(file=file, num_bytes=len(data)),),
        digest=weights_digest((entry.name, entry.dtype, entry.shape, entry.hash) for entry in entries),
    )
    path = folder / "manifest.json"
    path.write_bytes(msgspec.json.encode(manifest))
    return path


@contextmanager
def server(engine: str, folder: Path, model: Path) -> Iterator[tuple[str, str, float]]:
    """A server of `engine`: its address, its admin token, and the seconds it took to start."""
    started = time.monotonic()
    token, runs = folder / "token", folder / "runs"
    command = [sys.executable, "-m", "inference", "--engine", engine, "--model.path", str(model), "--server.port", "0"]
    command += ["--run.name", "bench", "--run.dir", str(runs), "--admin-token-file", str(token)]
    command += [f"--{engine}.max-model-len", "256", f"--{engine}.max-batch-size", str(max(BATCHES))]
    if engine == "vllm":
        command += ["--vllm.extra-args", json.dumps(["--skip-tokenizer-init"])]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)
    try:
        announcement = runs / "bench" / "services" / "inference.json"
        while not announcement.exists():
            if process.poll() is not None or time.monotonic() - started > START_S:
                raise SystemExit(f"{engine} did not start: {(folder / 'output').read_text()}")
            time.sleep(0.05)
        took_s = time.monotonic() - started
        yield json.loads(announcement.read_bytes())["addresses"]["http"], token.read_text(), took_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


async def generate(http: aiohttp.ClientSession, prompt: "list[int]", seed: int) -> GenerateReply:
    ids = EncodedTensor.of(np.array(prompt, dtype=np.int32))
    request = GenerateRequest(request_id=str(seed), token_ids=ids, max_tokens=NEW_TOKENS, seed=seed)
    async with http.post(GENERATE_PATH, data=encode(request)) as response:
        assert response.status == 200, await response.text()
        return msgspec.msgpack.decode(await response.read(), type=GenerateReply)


def make_prompts(num: int) -> "list[list[int]]":
    random = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(1, VOCAB_SIZE, (num, PROMPT_TOKENS), generator=random).tolist()
    return rows


async def tokens_per_s(http: aiohttp.ClientSession, num: int) -> float:
    best = 0.0
    for _ in range(REPEATS):
        started = time.monotonic()
        await asyncio.gather(*(generate(http, prompt, seed) for seed, prompt in enumerate(make_prompts(num))))
        best = max(best, num * NEW_TOKENS / (time.monotonic() - started))
    return round(best, 1)


async def update_seconds(http: aiohttp.ClientSession, token: str, manifests: "list[Path]") -> "list[float]":
    """Each update meets 64 requests in flight."""
    seconds = []
    headers = {"Authorization": f"Bearer {token}"}
    for version, path in enumerate(manifests, start=1):
        tasks = [asyncio.create_task(generate(http, prompt, seed)) for seed, prompt in enumerate(make_prompts(64))]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        order = msgspec.json.encode(ApplyWeights(manifest_path=str(path), version=version))
        async with http.post(WEIGHTS_PATH, data=order, headers=headers) as response:
            assert response.status == 200, await response.text()
        seconds.append(time.monotonic() - started)
        await asyncio.gather(*tasks)
    return seconds


@torch.inference_mode()
def mismatch(model: PreTrainedModel, prompts: "list[list[int]]", replies: "list[GenerateReply]") -> "dict[str, float]":
    """Largest and mean difference to the model's own log probabilities."""
    ids = torch.tensor([p + r.token_ids.numpy().tolist() for p, r in zip(prompts, replies, strict=True)])
    logits = model(ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(2, ids[:, PROMPT_TOKENS:, None])[..., 0]
    off = (torch.stack([torch.tensor(reply.logprobs.numpy()) for reply in replies]) - expected).abs()
    return {"max": float(f"{off.max():.3g}"), "mean": float(f"{off.mean():.3g}"), "tokens": off.numel()}


async def measure(url: str, token: str, root: Path) -> "dict[str, object]":
    models = [make_model(seed) for seed in range(NUM_UPDATES + 1)]
    manifests = [publish(root, model, version) for version, model in enumerate(models[1:], start=1)]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        speeds = {f"n{num}": await tokens_per_s(http, num) for num in BATCHES}
        updates = await update_seconds(http, token, manifests)
        prompts = make_prompts(64)
        replies = await asyncio.gather(*(generate(http, prompt, seed) for seed, prompt in enumerate(prompts)))
    return {
        "tokens_per_s": speeds,
        "update_s": {"median": round(statistics.median(updates), 4), "max": round(max(updates), 4)},
        "logprob_mismatch": mismatch(models[-1], prompts, list(replies)),
    }


def main(argv: "list[str] | None" = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine_servers.json")
    installed = [name for name, module in (("torch", "torch"), ("vllm", "vllm")) if importlib.util.find_spec(module)]
    parser.add_argument("--engines", nargs="+", default=installed, choices=installed)
    arguments = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        make_model(0).save_pretrained(Path(name) / "model")
        for engine in arguments.engines:
            folder = Path(name) / engine
            folder.mkdir()
            with server(engine, folder, Path(name) / "model") as (url, token, start_s):
                report = asyncio.run(measure(url, token, folder / "weights"))
            results[engine] = {"start_s": round(start_s, 1)} | report
            show(f"{engine}: {json.dumps(results[engine])}")
    machine = {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
