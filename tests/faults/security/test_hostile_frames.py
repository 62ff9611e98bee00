"""Hostile messages against a live batch server: it lives, its memory stays flat, and an honest trainer is served.

`--frames 1000000` is the long form (`make faults`).
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.conftest import Record
from tests.faults.security.hostile_frames import Attacker, attack
from tests.faults.security.hostile_messages import KINDS, MESSAGES, MIX, hostile_messages
from tests.support.fakes import Served
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import CodecError
from transport.outbox.outbox import Outbox
from transport.wire.codec import decode_client_message, encode
from transport.wire.messages import ClientMessage

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
