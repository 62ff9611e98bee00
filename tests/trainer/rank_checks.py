"""Run by torchrun in `test_ranks.py`: what two ranks must agree on. Writes what it saw to `<folder>/<rank>`."""

import sys
import threading
from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from runtime.errors import StorageError
from trainer.config.trainer import WeightsConfig
from trainer.errors import RankMismatch
from trainer.ranks import Ranks, join
from trainer.weights.channel import open_channel
from transport.weights.client import FetchSettings, fetch_weights
from transport.wire.weights import Channel, parse_location


def main(folder: Path) -> None:
    ranks = join("cpu", timeout_s=30)
    me = b"x" * (ranks.rank * 3)
    assert ranks.gather(me) == [b"", b"xxx"]
    assert ranks.gather(b"") == [b"", b""]
    assert ranks.any(ranks.rank == 1)
    assert not ranks.any(False)
    ranks.require_same("equal", "a value")
    assert caught(RankMismatch, lambda: ranks.require_same(str(ranks.rank), "a value")) == (
        "ranks disagree on a value: rank 0: 0, rank 1: 1"
    )
    assert ranks.together(lambda: str(ranks.rank).encode()) == [b"0", b"1"]
    assert caught(StorageError, lambda: ranks.together(lambda: refuse(ranks.rank == 1))) == "rank 1: disk full"
    ranks.barrier()
    publish_and_fetch(ranks)
    (folder / str(ranks.rank)).write_text(f"{ranks.rank} of {ranks.world_size}, first: {ranks.is_first}")
    ranks.close()


def publish_and_fetch(ranks: Ranks) -> None:
    """A sharded model over ZeroMQ is, byte for byte and by its digest, the model."""
    torch.manual_seed(5)
    model, whole = nn.Linear(7, 5), nn.Linear(7, 5)
    whole.load_state_dict(model.state_dict())
    mesh = ranks.mesh()
    assert mesh is not None
    fully_shard(model, mesh=mesh)
    with closing(open_channel(WeightsConfig(channel="collective"), Path(), "run", ranks)) as channel:
        published = channel.publish(model, 3)
        kind, address = parse_location(published.location)
        assert kind is Channel.COLLECTIVE
        settings = FetchSettings(chunk_bytes=16, lost_timeout_s=60, peer_timeout_s=10)  # over ZeroMQ all the same
        fetched = fetch_weights(address, "run", 3, settings, threading.Event())
        expected = {name: value.numpy().tobytes() for name, value in whole.state_dict().items()}
        assert {name: data.tobytes() for name, data in fetched.data.items()} == expected
        assert fetched.manifest.digest == published.digest
        ranks.barrier()


def refuse(really: bool) -> bytes:
    if really:
        raise OSError("disk full")
    return b""


def caught(kind: type[Exception], action: object) -> str:
    try:
        action()  # type: ignore[operator]
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


main(Path(sys.argv[1]))
