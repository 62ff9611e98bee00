"""Weights over ZeroMQ: whole and checked, or an error in time."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from tests.faults.chaos_proxy import ChaosProxy, Faults
from tests.transport.weights.weight_ranks import Tensors, WeightRanks, make_offer
from transport.client.link import Link
from transport.errors import BindError, PeerTimeout, Refused, RequestFailed, SecurityError, TransportError, WeightsError
from transport.security.keys import CurveKeys, make_keys
from transport.server.request_handler import foreign
from transport.weights.client import FetchedWeights, FetchSettings, fetch_weights
from transport.weights.server import WeightServer, WeightStore, answer_engine
from transport.wire.codec import decode_client_message, encode
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Failure,
    GetManifest,
    GetWeightBytes,
    GetWeights,
    Hello,
    Limits,
    WeightBytes,
    Weights,
    Welcome,
)
from transport.wire.weights import (
    BroadcastGroup,
)

PATIENT = FetchSettings(chunk_bytes=1000, timeout_s=60, lost_timeout_s=60, peer_timeout_s=10)
QUICK = FetchSettings(chunk_bytes=1000, timeout_s=60, lost_timeout_s=2, peer_timeout_s=1)
"""For transfers that must fail: how long a peer may be gone."""
DEADLINE_S = 60.0


def tensors(seed: int = 0) -> Tensors:
    """Several sizes: one row, none, more than a chunk."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (37, 21), "b": (5,), "c": (0, 3), "d": (1, 700), "e": (2, 3, 4)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def ranks() -> Iterator[WeightRanks]:
    with WeightRanks(3, peer_timeout_s=10) as ranks:
        yield ranks


def fetch(
    endpoint: str, version: int = 1, settings: FetchSettings = PATIENT, given_up: threading.Event | None = None
) -> FetchedWeights:
    return fetch_weights(endpoint, "default", version, settings, given_up or threading.Event())


def assert_equal(fetched: FetchedWeights, expected: Tensors) -> None:
    assert {name: data.tobytes() for name, data in fetched.data.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_whole_version_arrives_from_all_ranks(ranks: WeightRanks) -> None:
    ranks.put(tensors(1), 1)
    ranks.put(tensors(2), 2)
    assert_equal(fetch(ranks.endpoints[0], 2), tensors(2))
    assert_equal(fetch(ranks.endpoints[0], 1), tensors(1))
    assert fetch(ranks.endpoints[0], 2).manifest.version == 2


def test_several_engines_fetch_side_by_side(ranks: WeightRanks) -> None:
    ranks.put(tensors(), 1)
    results: list[FetchedWeights] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(ranks.endpoints[0]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(results) == 4
    for result in results:
        assert_equal(result, tensors())


def test_version_that_is_gone_is_refused_with_those_that_are_there() -> None:
    with WeightRanks(1, keep=2) as ranks:
        for version in (1, 2, 3):
            ranks.put(tensors(version), version)
        with pytest.raises(RequestFailed, match=r"version 1 is not held here.*\[2, 3\]"):
            fetch(ranks.endpoints[0], 1)
        assert_equal(fetch(ranks.endpoints[0], 3), tensors(3))


def test_republished_version_replaces_the_old_one(ranks: WeightRanks) -> None:
    ranks.put(tensors(1), 1)
    ranks.put(tensors(2), 1)
    assert_equal(fetch(ranks.endpoints[0], 1), tensors(2))


def test_bytes_that_do_not_have_the_published_hash_are_refused(ranks: WeightRanks) -> None:
    ranks.put(tensors(), 1, damage=True)
    with pytest.raises(WeightsError, match="is corrupt"):
        fetch(ranks.endpoints[0])


def test_engine_of_another_run_is_refused(ranks: WeightRanks) -> None:
    ranks.put(tensors(), 1)
    with pytest.raises(Refused, match="run 'theirs', this server runs 'default'"):
        fetch_weights(ranks.endpoints[0], "theirs", 1, PATIENT, threading.Event())


def test_peer_of_another_schema_is_refused_by_name() -> None:
    hello = Hello(seq=1, schema_version=1, run_id="r", rank=0, world_size=1, last_committed=0)
    assert foreign("r", hello) == f"schema version 1, this server speaks {SCHEMA_VERSION}"


def test_question_for_batches_is_answered_with_a_failure() -> None:
    reply, _ = answer_engine(WeightStore(2), Limits(), GetManifest(seq=3, step=1))
    assert reply == Failure(seq=3, reason="this weight server has no such thing")


def test_only_keys_on_the_allow_list_are_served(tmp_path: Path) -> None:
    make_keys(tmp_path / "trainer")
    make_keys(tmp_path / "stranger")
    (tmp_path / "stranger" / "server.public").write_bytes((tmp_path / "trainer" / "server.public").read_bytes())
    with WeightRanks(2, keys=CurveKeys.for_server(tmp_path / "trainer")) as ranks:
        ranks.put(tensors(), 1)
        ours = with_(PATIENT, keys=CurveKeys.for_client(tmp_path / "trainer"))
        assert_equal(fetch(ranks.endpoints[0], 1, ours), tensors())
        theirs = with_(PATIENT, keys=CurveKeys.for_client(tmp_path / "stranger"))
        with pytest.raises(Refused, match=r"stranger/client\.public: it is not on the server's allow-list"):
            fetch(ranks.endpoints[0], 1, theirs)
        with pytest.raises(TransportError):
            fetch(ranks.endpoints[0], 1, QUICK)


def with_(settings: FetchSettings, **changes: object) -> FetchSettings:
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def test_address_that_others_reach_needs_keys() -> None:
    with pytest.raises(SecurityError, match="reachable from other machines"):
        WeightServer("tcp://0.0.0.0:0", "run", WeightStore(2))


def test_taken_address_is_a_bind_error() -> None:
    with WeightRanks(1) as ranks, pytest.raises(BindError):
        WeightServer(ranks.endpoints[0], "run", WeightStore(2)).__enter__()


class Script:
    """A weight server that answers each question as the test says."""

    def __init__(self, reply: "Callable[[object], list[bytes] | None]") -> None:
        self._reply = reply
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Script":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                identity, head = self._socket.recv_multipart()
                message = decode_client_message(head)
                if isinstance(message, Hello):
                    parts = [encode(Welcome(seq=message.seq, schema_version=SCHEMA_VERSION))]
                else:
                    parts = self._reply(message) or []
                if parts:
                    self._socket.send_multipart([identity, *parts])


def test_chunk_that_arrives_damaged_is_asked_for_again() -> None:
    asked: list[int] = []
    store = WeightStore(2)

    def reply(message: object) -> "list[bytes] | None":
        if not isinstance(message, GetWeightBytes | GetWeights):
            return None
        answered, frames = answer_engine(store, Limits(), message)
        if isinstance(message, GetWeightBytes):
            asked.append(message.offset)
            if len(asked) == 2:
                return [encode(answered), bytes(len(frames[0]))]
        return [encode(answered), *map(bytes, frames)]

    with Script(reply) as script:
        offer, held = make_offer(tensors(), 1, (script.endpoint,))
        store.put(offer, held[0])
        assert_equal(fetch(script.endpoint), tensors())
    assert asked[:3] == [0, 1000, 1000]


def test_chunk_that_always_arrives_damaged_ends_the_transfer() -> None:
    def reply(message: object) -> "list[bytes] | None":
        match message:
            case GetWeights(seq=seq):
                return [encode(Weights(seq=seq, offer=make_offer(tensors(), 1, (script.endpoint,))[0]))]
            case GetWeightBytes(seq=seq, num_bytes=num_bytes):
                return [encode(WeightBytes(seq=seq, hash=1)), bytes(num_bytes)]
        return None

    with Script(reply) as script, pytest.raises(WeightsError, match=r"arrived damaged from .* 3 times"):
        fetch(script.endpoint)


def test_server_that_falls_silent_in_mid_transfer_ends_it_in_time() -> None:
    def reply(message: object) -> "list[bytes] | None":
        if isinstance(message, GetWeights):
            return [encode(Weights(seq=message.seq, offer=make_offer(tensors(), 1, (script.endpoint,))[0]))]
        return None

    started = time.monotonic()
    with Script(reply) as script, pytest.raises(PeerTimeout, match="did not answer GetWeightBytes"):
        fetch(script.endpoint, settings=QUICK)
    assert time.monotonic() - started < DEADLINE_S


def test_nobody_there_ends_in_time() -> None:
    with WeightRanks(1) as ranks:
        endpoint = ranks.endpoints[0]
    with pytest.raises(PeerTimeout):
        fetch(endpoint, settings=QUICK)


def test_wait_names_the_server_and_no_part_of_the_system() -> None:
    """Both an engine and a trainer wait on a `Link`, for different peers."""
    heard: list[str] = []
    with WeightRanks(1) as ranks:
        endpoint = ranks.endpoints[0]
    link = Link(
        endpoint,
        lambda seq: Hello(seq=seq, schema_version=SCHEMA_VERSION, run_id="r", rank=0, world_size=1, last_committed=0),
        keys=None,
        limits=Limits(),
        peer_timeout_s=0.2,
        heartbeat_s=0.1,
        on_wait=heard.append,
        on_link=lambda problem: None,
    )
    try:
        with pytest.raises(PeerTimeout):
            link.connect(1.0)
    finally:
        link.close("done")
    assert heard
    assert all(news.startswith(endpoint) for news in heard)


class BlockingStore(WeightStore):
    """Calls `hook` at each read of bytes."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def read(self, version: int, offset: int, num_bytes: int) -> memoryview:
        self.hook()
        return super().read(version, offset, num_bytes)


def test_trainer_that_dies_in_mid_transfer_is_an_error_and_its_successor_is_not() -> None:
    store = BlockingStore(2)
    cut = threading.Event()
    with WeightServer("tcp://127.0.0.1:0", "default", store) as server:
        port = int(server.endpoint.rpartition(":")[2])
        with ChaosProxy(port) as proxy:
            endpoint = f"tcp://127.0.0.1:{proxy.port}"
            offer, held = make_offer(tensors(), 1, (endpoint,))
            store.put(offer, held[0])

            def die() -> None:
                cut.set()
                proxy.faults = Faults(black_hole=True)

            store.hook = die  # type: ignore[method-assign]
            with pytest.raises(PeerTimeout):
                fetch(endpoint, settings=QUICK)
    assert cut.is_set()
    with WeightRanks(1) as successor:
        successor.put(tensors(), 1)
        assert_equal(fetch(successor.endpoints[0]), tensors())


def test_caller_that_loses_interest_ends_the_transfer() -> None:
    given_up = threading.Event()
    store = BlockingStore(2)
    store.hook = given_up.set  # type: ignore[method-assign]
    with WeightServer("tcp://127.0.0.1:0", "default", store) as server:
        offer, held = make_offer(tensors(), 1, (server.endpoint,))
        store.put(offer, held[0])
        with pytest.raises(WeightsError, match="does not wait any more"):
            fetch(server.endpoint, given_up=given_up)


def test_transfer_that_takes_too_long_is_given_up() -> None:
    store = BlockingStore(2)
    never = threading.Event()
    store.hook = lambda: never.wait(0.3) and None  # type: ignore[method-assign]
    with WeightServer("tcp://127.0.0.1:0", "default", store) as server:
        offer, held = make_offer(tensors(), 1, (server.endpoint,))
        store.put(offer, held[0])
        with pytest.raises(PeerTimeout):
            fetch(server.endpoint, settings=FetchSettings(chunk_bytes=64, timeout_s=0.5))


def test_server_whose_thread_died_says_so() -> None:
    store = BlockingStore(2)

    def explode() -> None:
        raise RuntimeError("a bug")

    store.hook = explode  # type: ignore[method-assign]
    with WeightServer("tcp://127.0.0.1:0", "default", store) as server:
        offer, held = make_offer(tensors(), 1, (server.endpoint,))
        store.put(offer, held[0])
        server.check()
        with pytest.raises(TransportError):
            fetch(server.endpoint, settings=QUICK)
        with pytest.raises(WeightsError, match="has died"):
            server.check()


def join_of(group: BroadcastGroup) -> list[float]:
    """The seconds that a transfer of up to 60 s grants each step of a group that the server opened."""
    granted: list[float] = []

    def join(group: BroadcastGroup, num_bytes: int, timeout_s: float) -> Iterator[np.ndarray]:  # type: ignore[type-arg]
        granted.append(timeout_s)
        yield np.zeros(num_bytes, np.uint8)

    with WeightRanks(1, open_group=lambda data: group, peer_timeout_s=10) as ranks:
        ranks.put({"a": np.zeros(3, np.float32)}, 1)
        fetch(ranks.endpoints[0], settings=dataclasses.replace(PATIENT, join=join))
    return granted


@pytest.mark.parametrize(("offered", "least", "most"), [(25.0, 25.0, 25.0), (1e9, 1.0, 60.0)])
def test_broadcast_has_the_time_that_the_trainer_grants_within_the_engines_own(
    offered: float, least: float, most: float
) -> None:
    group = BroadcastGroup(host="127.0.0.1", port=1, backend="gloo", chunk_bytes=64, timeout_s=offered)
    (granted,) = join_of(group)
    assert least <= granted <= most


@pytest.mark.parametrize("change", [{"timeout_s": float("nan")}, {"timeout_s": -1.0}, {"chunk_bytes": 0}])
def test_group_that_nobody_can_join_is_an_error(change: dict[str, float]) -> None:
    group = BroadcastGroup(host="127.0.0.1", port=1, backend="gloo", chunk_bytes=64, timeout_s=1.0)
    with pytest.raises(WeightsError, match="cannot be joined"):
        join_of(msgspec.structs.replace(group, **change))
