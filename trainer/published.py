"""`PublishedWeights`: a version that engines can load; `WeightChannel`: what makes one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from transport.canary import Canary


@dataclass(frozen=True)
class PublishedWeights:
    """A version that engines can load."""

    version: int
    location: str
    """As `transport.location` spells it."""
    digest: str
    canary: Canary | None = None

    @property
    def manifest_path(self) -> Path:
        """The manifest file of a publish on disk."""
        return Path(self.location)


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
        """Serve no more. Idempotent."""
        ...
