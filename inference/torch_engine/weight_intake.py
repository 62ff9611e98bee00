"""`WeightIntake`: a publish in memory, whole and checked, from whichever channel. No model changes here."""

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from inference.config import WeightsConfig
from inference.errors import WeightsRefused
from inference.torch_engine.broadcast_intake import join_broadcast
from inference.torch_engine.weights import VerifiedWeights, read_publish
from runtime.errors import UserError
from transport.errors import SecurityError, TransportError
from transport.security.keys import CurveKeys
from transport.weights.client import Bytes, FetchSettings, fetch_weights
from transport.wire.weights import Channel, TensorEntry, parse_location


@dataclass(frozen=True, slots=True)
class WeightIntake:
    """Takes publishes of run `run_id`."""

    run_id: str
    settings: FetchSettings = field(default_factory=FetchSettings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the model is."""

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


def fetch_settings(config: WeightsConfig) -> FetchSettings:
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
