"""`Broadcaster`: the trainer's side of the `collective` channel: a torch process group of two for every transfer.

A group lives for one transfer in a thread of its own, beside the group that trains. An engine that does not come, or
that stops in the middle, costs that thread until its deadline and nothing else; the next transfer begins afresh.
Process groups are neither encrypted nor authenticated: the engine checks every hash against the manifest, which came
over ZeroMQ.
"""

import socket
import threading
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from loguru import logger
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from transport.errors import WeightsError
from transport.security.exposure import family_of, is_wildcard, netloc
from transport.wire.weights import BroadcastGroup

CHUNK_BYTES = 64 << 20
MAX_GROUPS = 64
"""Transfers under way at once."""


class SendingGroup(Protocol):
    """What we use of a process group; torch's own types say too little."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """Send from the root to all."""
        ...


class Broadcaster:
    """Opens groups on `host`. `device` is where this rank trains: it decides between gloo and NCCL."""

    def __init__(self, host: str, advertised_host: str | None, device: torch.device, timeout_s: float) -> None:
        self._host = host
        self._is_wildcard = is_wildcard(f"tcp://{netloc(host, 0)}")
        self._advertised = advertised_host or (socket.getfqdn() if self._is_wildcard else host)
        self._device = device
        self._timeout_s = timeout_s
        self._threads: list[threading.Thread] = []

    def open(self, data: memoryview) -> BroadcastGroup:
        """An `OpenGroup` for the weight server (`transport/weights/server.py`)."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_GROUPS:
            raise WeightsError(f"{MAX_GROUPS} broadcasts are under way already: ask again later")
        try:
            family = family_of(self._host)  # torch's own would listen on every address
            is_dual = self._is_wildcard and family is socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server((self._host, 0), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            raise WeightsError(f"cannot listen on {self._host} for a broadcast: {error}") from error
        port = int(listener.getsockname()[1])
        thread = threading.Thread(target=self._send, args=(listener, port, data), name="broadcast", daemon=True)
        self._threads.append(thread)
        thread.start()
        return BroadcastGroup(
            host=self._advertised,
            port=port,
            backend=dist.get_default_backend_for_device(self._device),
            chunk_bytes=CHUNK_BYTES,
            timeout_s=self._timeout_s,
        )

    def _send(self, listener: socket.socket, port: int, data: memoryview) -> None:
        try:
            group = self._join(listener, port)
            root = dist.BroadcastOptions()
            root.rootRank = 0
            content = torch.frombuffer(data, dtype=torch.uint8)
            for chunk in torch.split(content, CHUNK_BYTES):
                group.broadcast([chunk.to(self._device)], root).wait()
        except (RuntimeError, OSError) as error:  # the engine is gone, or too slow: it will ask again
            logger.warning(f"a broadcast of {data.nbytes} bytes was not finished: {str(error).splitlines()[0]}")

    def _join(self, listener: socket.socket, port: int) -> SendingGroup:
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(
            self._host,
            port,
            2,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        if self._device.type == "cpu":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            name = socket.gethostname() if self._is_wildcard else self._host
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=name)]
            gloo._timeout = timeout
            return cast(SendingGroup, dist.ProcessGroupGloo(store, 0, 2, gloo))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast(SendingGroup, dist.ProcessGroupNCCL(store, 0, 2, options))
