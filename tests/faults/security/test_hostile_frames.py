"""Hostile messages against a live batch server: it lives, its memory stays flat, and an honest trainer is served.

`--frames 1000000` is the long form (`make faults`).

Hostile messages against a weight server, which is a thread of the trainer: it lives, and engines get the weights.

Nothing that a peer sends may hold a field we do not know, however deep: every type of the wire says so itself.
"""

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from orchestrator.envs.workers.link import FromWorker, ToWorker
from tests.faults.conftest import Record
from tests.faults.security.hostile_frames import KINDS, MESSAGES, MIX, Attacker, attack, hostile_messages
from tests.support.fakes import Served
from tests.transport.samples import RUN, make_batch
from tests.transport.weights.weight_ranks import Tensors, WeightRanks
from transport.client.client import BatchClient
from transport.errors import CodecError
from transport.outbox.outbox import Outbox
from transport.outbox.progress import ReportedProgress
from transport.weights.client import FetchSettings, fetch_weights
from transport.wire.codec import decode_client_message, encode
from transport.wire.generation import ApplyWeights, GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.manifest import SCHEMA_VERSION, BatchManifest
from transport.wire.messages import ClientMessage, GetBroadcast, GetWeightBytes, GetWeights, Hello, ServerMessage
from transport.wire.sample import TrainingSample

NUM_FRAMES = 30_000


@pytest.mark.long
def test_tens_of_thousands_of_hostile_messages_change_nothing(
    tmp_path: Path, frames: int | None, record: Record
) -> None:
    num_frames = frames or NUM_FRAMES
    figures = attack(tmp_path, num_frames, seed=7)
    assert figures["crashes"] == 0
    assert figures["honest_fetches"] > 100
    rejected = figures["rejected"]
    assert isinstance(rejected, dict)
    assert rejected["garbage"] > num_frames / 2
    assert figures["log_lines"] < 12, "a line per kind of offence, not per offence"
    record("hostile_frames", figures)


def test_the_mix_has_every_kind_of_message_and_is_reproducible() -> None:
    first = list(itertools.islice(hostile_messages(1), 2000))
    assert first == list(itertools.islice(hostile_messages(1), 2000))
    assert first != list(itertools.islice(hostile_messages(2), 2000))
    assert {type(message) for message in MESSAGES} == set(ClientMessage.__args__)
    assert any(len(frames) > 1 for frames in first)
    assert sum(share for _, share in MIX) == 100


def test_peers_that_flood_and_leave_do_not_abort_the_server() -> None:
    """libzmq 4.3.5 does abort where it sends heartbeats to such a peer (`transport/security/sockets.py`)."""
    command = [sys.executable, "-m", "tests.faults.security.unread_router"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(Outbox(tmp_path_factory.mktemp("outbox"), RUN)) as served:
        served.call(served.server.publish(make_batch(1)))
        yield served


@pytest.fixture(scope="module")
def attacker(served: Served) -> Iterator[Attacker]:
    attacker = Attacker(served.endpoint, reads=True)
    yield attacker
    attacker.close()


@pytest.fixture(scope="module")
def honest(served: Served) -> Iterator[BatchClient]:
    with BatchClient(served.endpoint, RUN, connect_timeout_s=10, lost_timeout_s=10) as client:
        client.hello()
        yield client


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=30)
    | st.binary(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

FIELDS = st.dictionaries(
    st.sampled_from(sorted({field for message in MESSAGES for field in message.__struct_fields__})), VALUES, max_size=7
)

LOOKALIKES = st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"kind": kind, **fields}), st.sampled_from(KINDS), FIELDS
)

FRAMES = st.binary(max_size=300) | LOOKALIKES | VALUES.map(msgspec.msgpack.encode)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.lists(FRAMES, min_size=1, max_size=3), min_size=1, max_size=20))
def test_whatever_hypothesis_says_the_honest_trainer_gets_its_samples(
    messages: list[list[bytes]], served: Served, attacker: Attacker, honest: BatchClient
) -> None:
    for frames in messages:
        attacker.send(frames)
    attacker.sync()
    assert len(honest.samples(make_batch(1).manifest, range(8))) == 8
    progress = served.server.outbox.progress
    assert (progress.last_trained, progress.last_committed, progress.weights) == (0, 0, None)


@settings(max_examples=200, deadline=None)
@given(FRAMES)
def test_decoding_gives_a_message_or_our_own_error(frame: bytes) -> None:
    try:
        message = decode_client_message(frame)
    except CodecError:
        return
    assert decode_client_message(encode(message)) == message


WEIGHT_RUN = "default"

NUM_WEIGHT_FRAMES = 5_000

HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=WEIGHT_RUN, rank=0, world_size=1, last_committed=0)

EDGES = (0, 1, -1, 7, 2**31, 2**40, -(2**63), 2**63 - 1)

SETTINGS = FetchSettings(chunk_bytes=1000, timeout_s=60, lost_timeout_s=60, peer_timeout_s=30)


def tensors() -> Tensors:
    return {"a": np.arange(777, dtype=np.float32).reshape(37, 21), "b": np.ones(5, dtype=np.float32)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[WeightRanks]:
    with WeightRanks(1, run_id=WEIGHT_RUN, peer_timeout_s=30) as ranks:
        ranks.put(tensors(), 1)
        yield ranks


@pytest.fixture
def weight_attacker(ranks: WeightRanks) -> Iterator[Attacker]:
    weight_attacker = Attacker(ranks.endpoints[0], reads=True)
    yield weight_attacker
    weight_attacker.close()


def assert_serves(ranks: WeightRanks) -> None:
    ranks.servers[0].check()
    fetched = fetch_weights(ranks.endpoints[0], WEIGHT_RUN, 1, SETTINGS, threading.Event())
    assert {name: data.tobytes() for name, data in fetched.data.items()} == {
        name: value.tobytes() for name, value in tensors().items()
    }


def test_messages_of_strangers_change_nothing(ranks: WeightRanks, weight_attacker: Attacker) -> None:
    for frames in itertools.islice(hostile_messages(seed=3), NUM_WEIGHT_FRAMES):
        weight_attacker.send(frames)
    weight_attacker.sync()
    assert_serves(ranks)


def test_messages_of_one_that_was_welcomed_end_no_trainer(ranks: WeightRanks, weight_attacker: Attacker) -> None:
    """Absurd versions, offsets and sizes among the mix, greeted anew now and then: the mix has goodbyes."""
    draw = random.Random(4)
    for number, frames in enumerate(itertools.islice(hostile_messages(seed=4), NUM_WEIGHT_FRAMES)):
        if number % 50 == 0:
            weight_attacker.send([encode(HELLO)])
        weight_attacker.send(frames)
        weight_attacker.send([encode(absurd(draw, number))])
    for message in MESSAGES:
        weight_attacker.send([encode(message)])
    weight_attacker.send([encode(HELLO)])
    weight_attacker.sync()
    assert_serves(ranks)


def absurd(draw: random.Random, seq: int) -> msgspec.Struct:
    """A sound question with numbers at the edges of what can be said."""
    match draw.randrange(3):
        case 0:
            return GetWeights(seq=seq, version=draw.choice(EDGES))
        case 1:
            return GetBroadcast(seq=seq, version=draw.choice(EDGES))
        case _:
            offset, num_bytes = draw.choice(EDGES), draw.choice(EDGES)
            return GetWeightBytes(seq=seq, version=1, offset=offset, num_bytes=num_bytes)


WIRE = {
    "link": (ClientMessage | ServerMessage, 25),
    "samples": (TrainingSample | None, 2),
    "manifests": (BatchManifest | None, 2),
    "engines": (GenerateRequest | None, 2),
    "replies": (GenerateReply | None, 2),
    "scoring": (ScoreRequest | None, 1),
    "scores": (ScoreReply | None, 1),
    "weights": (ApplyWeights | None, 1),
    "workers": (ToWorker | FromWorker, 15),
    "progress": (ReportedProgress | None, 2),
}
"""The types that are decoded, and how many there are at least in each, so that the walk cannot come back empty."""


class Lenient(msgspec.Struct):
    """What must be found."""


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """A strict type around one that is not."""

    inner: dict[str, tuple[Lenient | None, ...]] | None = None


def structs(kind: inspect.Type) -> set[type]:
    """Every struct and dataclass within `kind`."""
    found: set[type] = set()
    waiting: list[object] = [kind]
    while waiting:
        match waiting.pop():
            case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
                if cls not in found:
                    found.add(cls)
                    waiting += [field.type for field in fields]
            case inspect.Type() as other:
                waiting += msgspec.structs.astuple(other)
            case tuple() as several:
                waiting += several
    return found


def lenient(kind: inspect.Type) -> list[str]:
    return sorted(each.__name__ for each in structs(kind) if not is_strict(each))


def is_strict(kind: type) -> bool:
    """Dataclasses cannot be."""
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("name", WIRE)
def test_every_type_of_the_wire_refuses_fields_that_it_does_not_know(name: str) -> None:
    kind, at_least = WIRE[name]
    assert len(structs(inspect.type_info(kind))) >= at_least
    assert lenient(inspect.type_info(kind)) == []


def test_a_lenient_type_is_found_however_deep_it_lies() -> None:
    assert lenient(inspect.type_info(list[Outer])) == ["Lenient"]
