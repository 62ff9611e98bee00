"""Update times for people and metrics. Needs no model library."""

import msgspec

from transport.generation import UpdateTimes


def phases_of(times: UpdateTimes | None) -> dict[str, float]:
    """Seconds by phase; empty before the first update."""
    return (
        {} if times is None else {phase: round(seconds, 4) for phase, seconds in msgspec.structs.asdict(times).items()}
    )


def describe(times: UpdateTimes | None) -> str:
    """For the end of a line of the log."""
    return "".join(f", {phase.removesuffix('_s')} {seconds:.3f} s" for phase, seconds in phases_of(times).items())
