"""Sample -> wire -> tensor, and the link, beside msgspec lists, pickle, torch.save and raw pyzmq in the same run.

    python benchmarks/wire.py [--out benchmarks/results/wire.json]

Codec figures are CPU seconds of one core (the machine may be shared), best of several repeats, with every check and
hash that production does; "tensor" is one packed tensor per stream and micro batch. Link figures are wall time of two
real processes over loopback TCP. The alternatives that unpickle exist here only, to be measured.
"""

import argparse
import io
import json
import multiprocessing
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop
import zmq

from transport.batch import EncodedBatch, build_batch, decode_rows
from transport.batch_file import file_chunks
from transport.client import BatchClient
from transport.outbox import Outbox
from transport.sample import TrainingSample, VersionSpan
from transport.security import CurveKeys, make_keys
from transport.server import BatchServer
from transport.tensor import EncodedTensor

RUN = "bench"
NUM_SAMPLES, NUM_TOKENS = 128, 4096
MICRO_BATCH_SAMPLES = 4
TOKENS = NUM_SAMPLES * NUM_TOKENS
REPEATS = 7
SPAWN = multiprocessing.get_context("spawn")
Tensors = list[torch.Tensor]


class ListSample(msgspec.Struct):
    """The usual way: one Python number per token."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    advantage: float


def make_samples(num_samples: int = NUM_SAMPLES, num_tokens: int = NUM_TOKENS) -> list[TrainingSample]:
    random = np.random.default_rng(0)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return [
        TrainingSample(
            run_id=RUN,
            env_name="env",
            example_id=str(number),
            group_id=f"env/{number // 8}/0",
            trajectory_id=f"env/{number // 8}/0#{number % 8}",
            token_ids=EncodedTensor.of(random.integers(0, 150_000, num_tokens, dtype=np.int32)),
            loss_mask=EncodedTensor.of(mask),
            logprobs=EncodedTensor.of(-random.random(num_tokens, dtype=np.float32)),
            advantages=0.5,
            temperature=1.0,
            reward=1.0,
            versions=(VersionSpan(0, num_tokens // 4, num_tokens),),
        )
        for number in range(num_samples)
    ]


def best_s(action: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Shortest of `repeats` runs: what the code costs when nobody disturbs."""
    times = []
    for _ in range(repeats):
        started = clock()
        action()
        times.append(clock() - started)
    return min(times)


def pack_arrays(samples: Sequence[Sequence[np.ndarray]]) -> list[Tensors]:
    """`samples` are (tokens, mask, logprobs); packed as the trainer packs: one tensor per stream and micro batch."""
    packed = []
    for first in range(0, len(samples), MICRO_BATCH_SAMPLES):
        streams = zip(*samples[first : first + MICRO_BATCH_SAMPLES], strict=True)
        packed.append([torch.from_numpy(np.concatenate(parts)) for parts in streams])
    return packed


def pack_tensors(samples: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
    """The same from tensors."""
    packed = []
    for first in range(0, len(samples), MICRO_BATCH_SAMPLES):
        streams = zip(*samples[first : first + MICRO_BATCH_SAMPLES], strict=True)
        packed.append([torch.cat(parts) for parts in streams])
    return packed


def pack_samples(samples: list[TrainingSample]) -> list[Tensors]:
    """The same from our samples."""
    return pack_arrays([(s.token_ids.numpy(), s.loss_mask.numpy(), s.logprobs.numpy()) for s in samples])


def pack_lists(samples: list[ListSample]) -> list[Tensors]:
    """The same from lists."""
    return pack_tensors(
        [
            (
                torch.tensor(s.token_ids, dtype=torch.int32),
                torch.tensor(s.loss_mask, dtype=torch.bool),
                torch.tensor(s.logprobs, dtype=torch.float32),
            )
            for s in samples
        ]
    )


def row(encode: Callable[[], object], decode: Callable[[], object], num_bytes: int, repeats: int) -> dict[str, float]:
    encode_s, decode_s = (best_s(action, repeats, time.process_time) for action in (encode, decode))
    return {
        "encode_mtok_s": TOKENS / encode_s / 1e6,
        "decode_to_tensor_mtok_s": TOKENS / decode_s / 1e6,
        "sample_wire_tensor_mtok_s": TOKENS / (encode_s + decode_s) / 1e6,
        "bytes_per_token": num_bytes / TOKENS,
    }


def bench_tandem(samples: list[TrainingSample]) -> dict[str, float]:
    batch = build_batch(RUN, 1, samples)
    rows = range(len(samples))
    return row(
        lambda: build_batch(RUN, 1, samples),
        lambda: pack_samples(decode_rows(batch.manifest, rows, batch.frames)),
        batch.num_bytes,
        REPEATS * 10,
    )


def as_lists(samples: list[TrainingSample]) -> list[ListSample]:
    return [
        ListSample(s.token_ids.numpy().tolist(), s.loss_mask.numpy().tolist(), s.logprobs.numpy().tolist(), 0.5)
        for s in samples
    ]


def bench_msgspec_lists(samples: list[TrainingSample]) -> dict[str, float]:
    lists, decoder = as_lists(samples), msgspec.msgpack.Decoder(list[ListSample])
    packed = msgspec.msgpack.encode(lists)
    return row(lambda: msgspec.msgpack.encode(lists), lambda: pack_lists(decoder.decode(packed)), len(packed), REPEATS)


def bench_pickle_lists(samples: list[TrainingSample]) -> dict[str, float]:
    plain = [msgspec.structs.asdict(sample) for sample in as_lists(samples)]
    pickled = pickle.dumps(plain, protocol=5)

    def unpickle() -> list[Tensors]:
        return pack_lists([ListSample(**fields) for fields in pickle.loads(pickled)])

    return row(lambda: pickle.dumps(plain, protocol=5), unpickle, len(pickled), REPEATS)


def bench_arrays(samples: list[TrainingSample]) -> dict[str, dict[str, float]]:
    """pickle of numpy arrays and torch.save of tensors: no checks, no hashes, code execution on load."""
    arrays = [(s.token_ids.numpy(), s.loss_mask.numpy(), s.logprobs.numpy()) for s in samples]
    tensors = [tuple(torch.from_numpy(array.copy()) for array in streams) for streams in arrays]

    def save() -> bytes:
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        return buffer.getvalue()

    pickled, saved = pickle.dumps(arrays, protocol=5), save()
    return {
        "pickle_numpy": row(
            lambda: pickle.dumps(arrays, protocol=5), lambda: pack_arrays(pickle.loads(pickled)), len(pickled), REPEATS
        ),
        "torch_save": row(save, lambda: pack_tensors(torch.load(io.BytesIO(saved))), len(saved), REPEATS),
    }


# --- the link: a server process and this one ------------------------------------------------------------------------


async def _serve_tandem(directory: Path, keys: CurveKeys | None, ready: Connection) -> None:
    async with BatchServer("tcp://127.0.0.1:0", Outbox(directory, RUN), keys=keys) as server:
        ready.send(server.endpoint)
        await server.serve()


def serve_tandem(directory: Path, keys: CurveKeys | None, ready: Connection) -> None:
    uvloop.run(_serve_tandem(directory, keys, ready))


def serve_raw(frames: tuple[bytes, ...], keys: CurveKeys | None, ready: Connection) -> None:
    """The least that a ROUTER can do: any request gets all frames, from memory, without a thought."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    if keys is not None:
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, keys.public, keys.secret
    ready.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        identity, request = socket.recv_multipart()
        socket.send_multipart([identity, request, *(frames if request == b"batch" else ())], copy=False)


def timed_link(fetch: Callable[[], object], ping: Callable[[], object], num_bytes: int) -> dict[str, float]:
    num_pings = 300
    fetch()
    fetch_s = best_s(fetch, 10)
    ping_s = best_s(lambda: [ping() for _ in range(num_pings)], 3) / num_pings
    return {"mb_s": num_bytes / fetch_s / 1e6, "mtok_s": TOKENS / fetch_s / 1e6, "round_trip_us": ping_s * 1e6}


def bench_tandem_link(batch: EncodedBatch, keys: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        Outbox(Path(directory), RUN).put(batch)
        server_keys = CurveKeys.for_server(keys) if keys else None
        endpoint, process = _start(serve_tandem, Path(directory), server_keys)
        try:
            with BatchClient(endpoint, RUN, keys=CurveKeys.for_client(keys) if keys else None) as client:
                client.hello()
                fetch = lambda: client.samples(batch.manifest, range(NUM_SAMPLES))  # noqa: E731
                return timed_link(fetch, lambda: client.samples(batch.manifest, [0]), batch.num_bytes)
        finally:
            _stop(process)


def bench_raw_link(batch: EncodedBatch, keys: Path | None) -> dict[str, float]:
    endpoint, process = _start(serve_raw, batch.frames, CurveKeys.for_server(keys) if keys else None)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        if keys:
            own = CurveKeys.for_client(keys)
            (server,) = own.peers
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, own.public, own.secret
        socket.connect(endpoint)

        def ask(request: bytes) -> list[zmq.Frame]:
            socket.send(request)
            return socket.recv_multipart(copy=False)

        return timed_link(lambda: ask(b"batch"), lambda: ask(b"ping"), batch.num_bytes)
    finally:
        context.destroy(linger=0)
        _stop(process)


def _start(target: Callable[..., None], *arguments: object) -> tuple[str, multiprocessing.process.BaseProcess]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    if not ours.poll(30):
        raise SystemExit("the server process did not start")
    return ours.recv(), process


def _stop(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join()


def bench_fsync(batch: EncodedBatch) -> dict[str, float]:
    """What durability costs for one batch."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        outbox = Outbox(Path(directory), RUN)
        manifests = [msgspec.structs.replace(batch.manifest, step=step) for step in range(1, 11)]
        durable = [best_s(lambda m=m: outbox.put(EncodedBatch(m, batch.frames)), 1) for m in manifests]

        def write_only() -> None:
            with (Path(directory) / "plain").open("wb") as file:
                file.writelines(file_chunks(batch))

        plain = best_s(write_only, 10)
    return {
        "put_ms_median": float(np.median(durable)) * 1e3,
        "write_only_ms": plain * 1e3,
        "batch_mb": batch.num_bytes / 1e6,
    }


def bench_lengths() -> dict[str, dict[str, float]]:
    """The same number of tokens in shorter samples: the fixed cost of a sample shows, and the targets are not met below
    some length."""
    results = {}
    for num_tokens in (512, 1024, 2048, NUM_TOKENS):
        samples = make_samples(TOKENS // num_tokens, num_tokens)
        ours, lists = bench_tandem(samples), bench_msgspec_lists(samples)
        ratio = ours["decode_to_tensor_mtok_s"] / lists["decode_to_tensor_mtok_s"]
        results[str(num_tokens)] = ours | {"decode_to_tensor_over_lists": ratio}
    return results


def run() -> dict[str, object]:
    started = time.perf_counter()
    samples = make_samples()
    batch = build_batch(RUN, 1, samples)
    codecs = {
        "tandem": bench_tandem(samples),
        "msgspec_lists": bench_msgspec_lists(samples),
        "pickle_lists": bench_pickle_lists(samples),
        **bench_arrays(samples),
    }
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        make_keys(keys)
        links = {
            "tandem": bench_tandem_link(batch, None),
            "tandem_curve": bench_tandem_link(batch, keys),
            "raw_pyzmq": bench_raw_link(batch, None),
            "raw_pyzmq_curve": bench_raw_link(batch, keys),
        }
    ratio = codecs["tandem"]["decode_to_tensor_mtok_s"] / codecs["msgspec_lists"]["decode_to_tensor_mtok_s"]
    return {
        "workload": {"samples": NUM_SAMPLES, "tokens_per_sample": NUM_TOKENS},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]},
        "codecs": codecs,
        "by_tokens_per_sample": bench_lengths(),
        "links": links,
        "outbox": bench_fsync(batch),
        "targets": {
            "sample_wire_tensor_mtok_s": {"value": codecs["tandem"]["sample_wire_tensor_mtok_s"], "at_least": 50},
            "bytes_per_token": {"value": codecs["tandem"]["bytes_per_token"], "at_most": 12},
            "decode_to_tensor_over_lists": {"value": ratio, "at_least": 50},
        },
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "wire.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
