"""`EngineLoad`: how busy the engines say they are."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests of everybody who uses the engines, not of this run alone."""

    num_running: int = 0
    num_waiting: int = 0
    """Accepted, but without a place in the batch."""
    capacity: int = 0
    """Places in the batch; 0: not known."""


def total_load(loads: Iterable[EngineLoad]) -> EngineLoad:
    """Of several engines together."""
    known = list(loads)
    return EngineLoad(
        num_running=sum(load.num_running for load in known),
        num_waiting=sum(load.num_waiting for load in known),
        capacity=sum(load.capacity for load in known),
    )
