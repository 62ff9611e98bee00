"""Run by torchrun in `test_distributed.py`: what two ranks must agree on. Writes what it saw to `<folder>/<rank>`."""

import sys
from pathlib import Path

from runtime.errors import StorageError
from trainer.distributed import join
from trainer.errors import RankMismatch


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
    assert ranks.mesh() is not None
    (folder / str(ranks.rank)).write_text(f"{ranks.rank} of {ranks.world_size}, first: {ranks.is_first}")
    ranks.close()


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
