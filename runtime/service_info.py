"""What a live service says of itself in `services/<service>.json`."""

import os
import socket

import msgspec


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where to find a live process. Peers and people read it; unknown fields of newer versions are ignored."""

    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    health_url: str = ""
    """Full URL of `/health`."""
    addresses: dict[str, str] = {}
    """Other addresses by name, for example `{"batches": "tcp://127.0.0.1:29600"}`."""
