"""The engine's side of the `collective` channel: joins the process group of two that a trainer rank has opened.

Bytes land in a staging buffer on the CPU; the caller checks them before the model sees any. Whatever goes wrong ends
the group, and the next transfer makes a new one.
"""

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from transport.errors import WeightsError
from transport.security.exposure import netloc
from transport.weights.client import Bytes
from transport.wire.weights import BroadcastGroup


class Group(Protocol):
    """What we use of a process group; torch's own types say too little."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """From the root to all."""
        ...


def join_broadcast(group: BroadcastGroup, num_bytes: int, timeout_s: float, *, device: torch.device) -> Iterator[Bytes]:
    """See `transport.weights.client.JoinGroup`. `device` is where NCCL receives; gloo receives on the CPU."""
    try:
        process_group = _join(group, timedelta(seconds=timeout_s), device)
        root = dist.BroadcastOptions()
        root.rootRank = 0
        place = torch.device("cpu") if group.backend == "gloo" else device
        for start in range(0, num_bytes, group.chunk_bytes):
            chunk = torch.empty(min(group.chunk_bytes, num_bytes - start), dtype=torch.uint8, device=place)
            process_group.broadcast([chunk], root).wait()
            yield chunk.cpu().numpy()
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise WeightsError(f"the broadcast from {netloc(group.host, group.port)} failed: {reason}") from error


def _join(group: BroadcastGroup, timeout: timedelta, device: torch.device) -> Group:
    store = TCPStore(group.host, group.port, 2, is_master=False, timeout=timeout, wait_for_workers=False)
    if group.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(group.host, group.port))]
        options._timeout = timeout
        return cast(Group, dist.ProcessGroupGloo(store, 1, 2, options))
    if device.type == "cpu":
        raise WeightsError(f"the trainer broadcasts with {group.backend}, and this engine runs on a CPU")
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return cast(Group, dist.ProcessGroupNCCL(store, 1, 2, nccl))


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached: gloo listens there and nowhere else."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it is a datagram socket
        return str(probe.getsockname()[0])
