"""`Ranks`: the processes that train one model together, and the few things they tell each other.

A plain process is one rank and needs no process group. Under torchrun the environment names the ranks: gloo on CPU,
NCCL beside it on GPUs. What ranks exchange here is bytes, never pickled objects. Collectives have the timeout of
`parallel.timeout_s`, so between two of them no rank may do anything that takes long on some ranks only. What does, a
wait for the orchestrator or work on a disk, goes through `wait_together`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime.errors import PeerLostError, StorageError, UserError
from runtime.process.shutdown import Shutdown
from trainer.errors import RankMismatch

_T = TypeVar("_T")


class BackgroundCall(Future[_T]):
    """Runs `work` once, from construction on. Its thread is a daemon: when another rank has failed, this process ends
    without waiting for it."""

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], _T]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:  # belongs to the thread that asks for the result
            self.set_exception(error)


APART_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other in groups `apart`. Training itself notices a silent rank sooner."""
MAX_SLICE_S = 1.0
_STOP = b"!"
_UNDER_WAY, _DONE, _FAILED = b"?", b"+", b"-"
"""What a rank says of its work in `wait_together`; a failed one also says why."""


def _ignore(missing: Sequence[int]) -> None:
    """Does nothing: the default of `on_wait`."""


@dataclass(frozen=True)
class Ranks:
    """One rank, this process, and its exchanges with the others."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """What they tell each other goes over this one; `None`: the one of all ranks that collectives use."""
    slice_s: float = MAX_SLICE_S
    """Seconds between two meetings in `wait_together`: much less than a collective may take."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return dist.is_initialized()

    def mesh(self, num_replicas: int = 1) -> DeviceMesh | None:
        """The mesh of the parameters; `None` for a plain process. Sharded over all ranks, or (HSDP) over
        `world_size / num_replicas` neighbours, and the same in every replica."""
        if not self.is_distributed:
            return None
        if num_replicas == 1:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        shape = (num_replicas, self.world_size // num_replicas)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def apart(self) -> "Ranks":
        """The same ranks with a patient process group of their own (on the CPU), for another thread, or for where they
        must wait longer for each other than in a step. Collective."""
        if not self.is_distributed:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=APART_TIMEOUT_S)))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(b"")

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank said, in rank order, on every rank."""
        if not self.is_distributed:
            return [data]
        with self.together_with_peers():
            return self._gather(data)

    @contextmanager
    def together_with_peers(self) -> Iterator[None]:
        """Turn the failure of a collective in the block, also one deep inside FSDP, into `PeerLostError`."""
        try:
            yield
        except RuntimeError as error:
            if not is_collective_failure(error):
                raise
            raise PeerLostError(f"rank {self.rank} lost another rank: {error}") from error

    def _gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=self.group)
        longest = max(int(size.item()) for size in sizes)
        if longest == 0:
            return [b""] * self.world_size
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self.group)
        return [part.numpy().tobytes()[: int(size.item())] for part, size in zip(parts, sizes, strict=True)]

    def wait_together(
        self,
        work: Callable[[], _T],
        on_wait: Callable[[Sequence[int]], None] = _ignore,
        stop: Shutdown | None = None,
    ) -> _T:
        """What `work` returns on this rank, once it has returned on every rank. Collective.

        `work` may take as long as it likes, on any rank: it runs in a thread, and the ranks meet in short collectives
        until it has ended everywhere. It must have its own deadline, and no collective inside. `on_wait` hears of the
        ranks that are not ready while this one is. When `work` fails, its rank raises what it raised, and all others,
        without waiting for their own, a `PeerLostError` that says what. A rank that is asked to `stop` asks all others
        to, too: `work` that waits for something may then end, where it would have gone on.
        """
        if not self.is_distributed:
            return work()
        call = BackgroundCall(work, "wait together")
        while True:
            wait([call], self.slice_s)
            state = _state(call)
            is_stopping = stop is not None and stop.requested
            said_by_rank = self.gather((_STOP if is_stopping else b" ") + state)
            if stop is not None and any(said[:1] == _STOP for said in said_by_rank):
                stop.request()
            states = [said[1:] for said in said_by_rank]
            failures = [f"rank {rank}: {said[1:].decode()}" for rank, said in enumerate(states) if said[:1] == _FAILED]
            if failures and state[:1] != _FAILED:
                raise PeerLostError("; ".join(failures))
            missing = [rank for rank, said in enumerate(states) if said != _DONE]
            if state[:1] == _FAILED or not missing:
                return call.result()
            if state == _DONE:
                on_wait(missing)

    def together(self, work: Callable[[], bytes]) -> list[bytes]:
        """Do `work` on every rank and gather what it returns. It may take as long as a service may go without progress.

        An `OSError` on any rank becomes a `StorageError` on all: none goes on, and none is left waiting for the others.
        """

        def attempt() -> bytes:
            try:
                return b"+" + work()
            except OSError as error:
                return f"-rank {self.rank}: {error}".encode()

        answers = self.gather(self.wait_together(attempt))
        failures = [data[1:].decode() for data in answers if data.startswith(b"-")]
        if failures:
            raise StorageError("; ".join(failures))
        return [data[1:] for data in answers]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Collective."""
        return b"1" in self.gather(b"1" if flag else b"0")

    def require_same(self, value: str, what: str) -> None:
        """Raise `RankMismatch` unless every rank holds the same `value`."""
        values = [data.decode() for data in self.gather(value.encode())]
        if len(set(values)) > 1:
            raise RankMismatch(what, values)

    def close(self) -> None:
        if self.is_distributed:
            dist.destroy_process_group()


def _state(call: BackgroundCall[_T]) -> bytes:
    if not call.done():
        return _UNDER_WAY
    error = call.exception()
    return _DONE if error is None else _FAILED + str(error).encode(errors="replace")


def is_collective_failure(error: RuntimeError) -> bool:
    """Whether a peer is dead or silent for too long: NCCL has classes for it, gloo only says where it happened."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def join(device: str, timeout_s: float) -> Ranks:
    """Join the ranks that the environment names (torchrun), or be the only one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = choose_device(device)
    if "RANK" not in os.environ:
        return Ranks(0, 1, chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return Ranks(int(os.environ["RANK"]), world_size, chosen, slice_s=min(MAX_SLICE_S, timeout_s / 4))


def choose_device(name: str) -> torch.device:
    """The device of this process: `auto` takes a GPU if there is one, and each rank of a machine its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device = {name!r} is not a device: {error}") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"model.device = {name!r}, but torch sees no GPU on this machine")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device.index is None else device
    torch.cuda.set_device(device)
    return device


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` summed in place over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
