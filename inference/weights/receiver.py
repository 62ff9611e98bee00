"""`WeightReceiver`: a publish in memory, whole and checked, from whichever channel. No model changes here."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from inference.config import WeightFetchConfig
from inference.errors import WeightsRefused
from inference.weights.publish import VerifiedWeights, read_publish
from runtime.errors import UserError
from transport.errors import SecurityError, TransportError, WeightsError
from transport.security.exposure import netloc
from transport.security.keys import CurveKeys
from transport.weights.client import Bytes, FetchSettings, fetch_weights
from transport.wire.weights import BroadcastGroup, Channel, TensorEntry, parse_location


class ReceivingGroup(Protocol):
    """What we use of a process group; torch's own types say too little."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work:
        """Receive from the root."""
        ...


def join_broadcast(group: BroadcastGroup, num_bytes: int, timeout_s: float, *, device: torch.device) -> Iterator[Bytes]:
    """See `transport.weights.client.JoinGroup`. `device` is where NCCL receives; gloo receives on the CPU.

    Bytes land in a staging buffer on the CPU; the caller checks them before the model sees any. Whatever goes wrong
    ends the group, and the next transfer makes a new one.
    """
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


def _join(group: BroadcastGroup, timeout: timedelta, device: torch.device) -> ReceivingGroup:
    store = TCPStore(group.host, group.port, 2, is_master=False, timeout=timeout, wait_for_workers=False)
    if group.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(group.host, group.port))]
        options._timeout = timeout
        return cast(ReceivingGroup, dist.ProcessGroupGloo(store, 1, 2, options))
    if device.type == "cpu":
        raise WeightsError(f"the trainer broadcasts with {group.backend}, and this engine runs on a CPU")
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return cast(ReceivingGroup, dist.ProcessGroupNCCL(store, 1, 2, nccl))


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached: gloo listens there and nowhere else."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it is a datagram socket
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class WeightReceiver:
    """Takes publishes of run `run_id`."""

    run_id: str
    settings: FetchSettings = field(default_factory=FetchSettings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def receive(self, location: str, version: int, given_up: threading.Event) -> VerifiedWeights:
        """All of `version`. Blocks; setting `given_up` ends a transfer soon. Raises `WeightsRefused`."""
        channel, address = parse_location(location)
        if channel is Channel.FILESYSTEM:
            return read_publish(Path(address), version=version, run_id=self.run_id, given_up=given_up)
        settings = self.settings
        if channel is Channel.COLLECTIVE:
            settings = replace(settings, join=partial(join_broadcast, device=self.device))
        try:
            fetched = fetch_weights(address, self.run_id, version, settings, given_up)
        except TransportError as error:
            raise WeightsRefused(f"version {version} is not loaded: {error}") from error
        manifest = fetched.manifest
        tensors = {entry.name: as_tensor(entry, fetched.data[entry.name]) for entry in manifest.tensors}
        return VerifiedWeights(version, manifest.digest, tensors, manifest.adapter)


def fetch_settings(config: WeightFetchConfig) -> FetchSettings:
    """As the config says. Raises `UserError` naming the key file that is missing or unsafe."""
    try:
        keys = None if config.keys_dir is None else CurveKeys.for_client(config.keys_dir, config.key_name)
    except SecurityError as error:
        raise UserError(f"weights.keys_dir: {error}") from error
    return FetchSettings(
        keys=keys,
        timeout_s=config.timeout_s,
        lost_timeout_s=config.lost_timeout_s,
        chunk_bytes=config.chunk_bytes,
    )


def as_tensor(entry: TensorEntry, data: Bytes) -> Tensor:
    """The tensor that these bytes are; not copied."""
    return torch.from_numpy(data).view(getattr(torch, entry.dtype)).reshape(entry.shape)
