"""Where a publish is, as one string that the orchestrator passes on and does not read.

/runs/a/weights/v00000012/manifest.json     files that trainer and engines both see
zmq:tcp://10.0.0.1:29700                    the weight server of the trainer's first rank
collective:tcp://10.0.0.1:29700             the same; the bytes come over a torch process group
"""

from enum import StrEnum


class Channel(StrEnum):
    """How weights travel from the trainer to the engines."""

    FILESYSTEM = "filesystem"
    """Safetensors files on a disk that both see."""
    ZMQ = "zmq"
    """From the memory of the trainer's ranks, over ZeroMQ."""
    COLLECTIVE = "collective"
    """From the memory of the trainer's ranks, by broadcast in a torch process group; ZeroMQ only makes the date."""


def location_of(channel: Channel, address: str) -> str:
    """The string for `address` on `channel`; a file's address is its path."""
    return address if channel is Channel.FILESYSTEM else f"{channel.value}:{address}"


def parse_location(location: str) -> tuple[Channel, str]:
    """Channel and address. Whatever names no other channel is a path."""
    prefix, colon, address = location.partition(":")
    named = {channel.value: channel for channel in Channel if channel is not Channel.FILESYSTEM}
    return (named[prefix], address) if colon and prefix in named else (Channel.FILESYSTEM, location)
