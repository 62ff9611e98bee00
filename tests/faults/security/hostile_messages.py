"""What an attacker sends to a batch server: an endless, reproducible mix of messages, wrong in every way we know.

    for frames in hostile_messages(seed=1): socket.send_multipart(frames)

The attacker does not know the run's id: nothing here can pass for a trainer of the run.
"""

import random
import struct
from collections.abc import Callable, Iterator

import msgspec

from transport.wire.codec import encode, int32
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Bye,
    Committed,
    GetBroadcast,
    GetManifest,
    GetSamples,
    GetWeightBytes,
    GetWeights,
    Hello,
    Ping,
    Trained,
    WeightsPublished,
)
from transport.wire.tensor import EncodedTensor

Frames = list[bytes]
Random = random.Random

FOREIGN_RUN = "not-this-run"
MESSAGES = (
    Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=FOREIGN_RUN, rank=0, world_size=1, last_committed=0),
    Hello(seq=1, schema_version=SCHEMA_VERSION + 1, run_id=FOREIGN_RUN, rank=0, world_size=1, last_committed=0),
    GetManifest(seq=2, step=1),
    GetSamples(seq=3, step=1, indices=int32([0, 1, 2])),
    GetSamples(seq=3, step=1, indices=EncodedTensor("int64", (2**40, 7), memoryview(b"x" * 8))),
    Trained(seq=4, step=1),
    Committed(seq=5, step=1),
    WeightsPublished(seq=6, version=1, location="/dev/zero", digest="0"),
    GetWeights(seq=9, version=1),
    GetWeightBytes(seq=10, version=1, offset=2**62, num_bytes=2**62),
    GetBroadcast(seq=11, version=-1),
    Ping(seq=7),
    Bye(seq=8, reason="x" * 300),
)
ENCODED = tuple(encode(message) for message in MESSAGES)
KINDS = (
    "hello",
    "get_manifest",
    "get_samples",
    "trained",
    "committed",
    "weights_published",
    "get_weights",
    "get_weight_bytes",
    "get_broadcast",
    "ping",
    "bye",
    "welcome",
)
FIELDS = ("seq", "schema_version", "run_id", "rank", "world_size", "last_committed", "step", "indices", "version", "x")


def hostile_messages(seed: int) -> Iterator[Frames]:
    """Messages for ever; the same ones for the same seed."""
    draw = random.Random(seed)
    makers = tuple(maker for maker, share in MIX for _ in range(share))
    while True:
        yield draw.choice(makers)(draw)


def noise(draw: Random) -> Frames:
    """Bytes that mean nothing."""
    return [draw.randbytes(draw.randrange(200))]


def mutated(draw: Random) -> Frames:
    """A real message with some bytes changed, cut, repeated or inserted."""
    frame = bytearray(draw.choice(ENCODED))
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(frame)) if frame else 0
        match draw.randrange(5):
            case 0 if frame:
                frame[at] = draw.randrange(256)
            case 1:
                del frame[at:]
            case 2:
                frame[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3 if frame:
                frame[at] ^= 1 << draw.randrange(8)
            case _:
                frame += frame[at : at + draw.randrange(1, 30)]
    return [bytes(frame)]


def mistyped(draw: Random) -> Frames:
    """Well-formed msgpack, with the tag of a message and fields of any type."""
    fields: dict[object, object] = {"kind": draw.choice(KINDS)}
    for name in draw.sample(FIELDS, draw.randrange(len(FIELDS))):
        fields[name] = anything(draw)
    return [msgspec.msgpack.encode(fields)]


def anything(draw: Random, depth: int = 0) -> object:
    """A value of any msgpack type."""
    match draw.randrange(9 if depth < 3 else 7):
        case 0:
            return None
        case 1:
            return draw.choice([0, 1, -1, 2**31, -(2**63), 2**64 - 1])
        case 2:
            return draw.choice([0.0, float("nan"), float("inf"), 1e308])
        case 3:
            return "\0\n\x1b" * draw.randrange(20)
        case 4:
            return draw.randbytes(draw.randrange(40))
        case 5:
            return draw.random() < 0.5
        case 6:
            return msgspec.msgpack.Ext(draw.randrange(-128, 128), draw.randbytes(4))
        case 7:
            return [anything(draw, depth + 1) for _ in range(draw.randrange(5))]
        case _:
            return {str(key): anything(draw, depth + 1) for key in range(draw.randrange(5))}


def nested(draw: Random) -> Frames:
    """Arrays or maps, thousands deep, alone or as a field."""
    opening = draw.choice([b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\1"])
    deep = opening * draw.choice([50, 1500, 20_000]) + b"\xc0"
    return [deep if draw.random() < 0.3 else b"\x82\xa4kind\xa4ping\xa1x" + deep]


def overpromised(draw: Random) -> Frames:
    """A string, array or map that claims to have up to four billion elements."""
    size = struct.pack(">I", draw.choice([2**32 - 1, 2**31, 2**24, 70_000]))
    head = draw.choice([b"\xdb", b"\xc6", b"\xdd", b"\xdf", b"\xc9"]) + size
    return [head + b"x" * draw.randrange(20) if draw.random() < 0.5 else b"\x82\xa4kind\xa4ping\xa3seq" + head]


def multipart(draw: Random) -> Frames:
    """A message in many parts where one is expected."""
    return [draw.choice((*ENCODED, b"")) for _ in range(draw.choice([2, 3, 10, 200]))]


def large(draw: Random) -> Frames:
    """Much, but below the limit."""
    kind = draw.choice((b"\x00", b"\xc1", b"\x91", b"a"))
    return [kind * draw.choice([10_000, 100_000])]


def unasked(draw: Random) -> Frames:
    """A perfect message of somebody who never said hello, or of another run or version."""
    return [draw.choice(ENCODED)]


MIX: tuple[tuple[Callable[[Random], Frames], int], ...] = (
    (noise, 10),
    (mutated, 40),
    (mistyped, 20),
    (nested, 3),
    (overpromised, 8),
    (multipart, 4),
    (large, 1),
    (unasked, 14),
)
