"""Hostile messages against a weight server, which is a thread of the trainer: it lives, and engines get the weights."""

import itertools
import random
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.faults.security.hostile_frames import Attacker
from tests.faults.security.hostile_messages import MESSAGES, hostile_messages
from tests.transport.weights.weight_ranks import Tensors, WeightRanks
from transport.weights.client import FetchSettings, fetch_weights
from transport.wire.codec import encode
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import GetBroadcast, GetWeightBytes, GetWeights, Hello

RUN = "default"
NUM_FRAMES = 5_000
HELLO = Hello(seq=1, schema_version=SCHEMA_VERSION, run_id=RUN, rank=0, world_size=1, last_committed=0)
EDGES = (0, 1, -1, 7, 2**31, 2**40, -(2**63), 2**63 - 1)
SETTINGS = FetchSettings(chunk_bytes=1000, timeout_s=60, lost_timeout_s=60, peer_timeout_s=30)


def tensors() -> Tensors:
    return {"a": np.arange(777, dtype=np.float32).reshape(37, 21), "b": np.ones(5, dtype=np.float32)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[WeightRanks]:
    with WeightRanks(1, run_id=RUN, peer_timeout_s=30) as ranks:
        ranks.put(tensors(), 1)
        yield ranks


@pytest.fixture
def attacker(ranks: WeightRanks) -> Iterator[Attacker]:
    attacker = Attacker(ranks.endpoints[0], reads=True)
    yield attacker
    attacker.close()


def assert_serves(ranks: WeightRanks) -> None:
    ranks.servers[0].check()
    fetched = fetch_weights(ranks.endpoints[0], RUN, 1, SETTINGS, threading.Event())
    assert {name: data.tobytes() for name, data in fetched.data.items()} == {
        name: value.tobytes() for name, value in tensors().items()
    }


def test_messages_of_strangers_change_nothing(ranks: WeightRanks, attacker: Attacker) -> None:
    for frames in itertools.islice(hostile_messages(seed=3), NUM_FRAMES):
        attacker.send(frames)
    attacker.sync()
    assert_serves(ranks)


def test_messages_of_one_that_was_welcomed_end_no_trainer(ranks: WeightRanks, attacker: Attacker) -> None:
    """Absurd versions, offsets and sizes among the mix, greeted anew now and then: the mix has goodbyes."""
    draw = random.Random(4)
    for number, frames in enumerate(itertools.islice(hostile_messages(seed=4), NUM_FRAMES)):
        if number % 50 == 0:
            attacker.send([encode(HELLO)])
        attacker.send(frames)
        attacker.send([encode(absurd(draw, number))])
    for message in MESSAGES:
        attacker.send([encode(message)])
    attacker.send([encode(HELLO)])
    attacker.sync()
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
