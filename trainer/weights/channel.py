"""`WeightChannel`: how engines get a policy version, and from the config to the channel of a run."""

import socket
from pathlib import Path
from typing import Protocol

from torch import nn

from runtime.errors import UserError
from trainer.config.trainer import WeightsConfig
from trainer.ranks import Ranks
from trainer.weights.broadcast import Broadcaster
from trainer.weights.files import FilePublisher
from trainer.weights.served import MemoryPublisher
from transport.errors import BindError, SecurityError
from transport.outbox.progress import PublishedWeights
from transport.security.exposure import is_wildcard, netloc
from transport.security.keys import CurveKeys
from transport.weights.server import WeightServer, WeightStore
from transport.wire.weights import AdapterInfo, Channel


class WeightChannel(Protocol):
    """How policy versions reach engines. `publish` is collective: every rank calls it."""

    @property
    def needs_us(self) -> bool:
        """Whether engines can load a version only while this process lives."""
        ...

    def publish(self, model: nn.Module, version: int) -> PublishedWeights:
        """Make `model` loadable as `version`, in the place of an older publish of it."""
        ...

    def close(self) -> None:
        """Stop serving engines. May be called twice."""
        ...


def open_channel(
    config: WeightsConfig, root: Path, run_id: str, ranks: Ranks, adapter: AdapterInfo | None = None
) -> WeightChannel:
    """The channel, ready to publish; the caller closes it. Raises `UserError` for keys or an address it cannot use."""
    if config.channel == "filesystem":
        return FilePublisher(root, run_id, config.keep, ranks, adapter=adapter)
    return _open_served(config, run_id, ranks, adapter)


def _open_served(config: WeightsConfig, run_id: str, ranks: Ranks, adapter: AdapterInfo | None) -> MemoryPublisher:
    port = config.port + ranks.rank if config.port else 0
    store = WeightStore(config.keep)
    broadcaster = Broadcaster(config.host, config.advertised_host, ranks.device, config.broadcast_timeout_s)
    try:
        keys = None if config.keys_dir is None else CurveKeys.for_server(config.keys_dir)
        endpoint = f"tcp://{netloc(config.host, port)}"
        server = WeightServer(
            endpoint,
            run_id,
            store,
            keys=keys,
            insecure=config.insecure,
            open_group=broadcaster.open if config.channel == "collective" else None,
        ).__enter__()
    except SecurityError as error:
        raise UserError(f"weights.keys_dir: {error}") from error
    except BindError as error:
        raise UserError(f"{error}; set --weights.port") from error
    address = advertised(server.endpoint, config.advertised_host)
    return MemoryPublisher(run_id, ranks, store, server, address, adapter, Channel(config.channel))


def advertised(endpoint: str, host: str | None) -> str:
    """`endpoint` as engines should spell it."""
    port = endpoint.rpartition(":")[2]
    if host is not None:
        return f"tcp://{netloc(host, port)}"
    return f"tcp://{socket.getfqdn()}:{port}" if is_wildcard(endpoint) else endpoint
