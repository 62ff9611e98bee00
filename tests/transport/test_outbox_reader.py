"""A rank that sees the server's outbox reads its rows there; whatever is wrong with that, it asks the server."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fakes import Served
from tests.transport.samples import RUN, make_batch
from transport.batch import decode_batch
from transport.client import BatchClient
from transport.errors import RequestFailed
from transport.outbox import Outbox, batch_path

DEADLINE_S = 30.0
STEPS = range(1, 8)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(Outbox(tmp_path / "outbox", RUN), park_s=0.1) as served:
        for step in STEPS:
            served.call(served.server.publish(make_batch(step)), timeout_s=DEADLINE_S)
        yield served


@pytest.fixture
def client(served: Served, tmp_path: Path) -> Iterator[BatchClient]:
    """It sees a copy of the outbox, so that a test can change what is read and not what is sent."""
    shutil.copytree(tmp_path / "outbox", tmp_path / "seen")
    with BatchClient(
        served.endpoint,
        RUN,
        connect_timeout_s=DEADLINE_S,
        lost_timeout_s=DEADLINE_S,
        peer_timeout_s=DEADLINE_S,
        outbox=tmp_path / "seen",
    ) as client:
        yield client


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def put_another_batch(path: Path) -> None:
    shutil.copy(path.with_name(batch_path(path.parent, 2).name), path)


def test_rows_that_are_seen_are_not_sent(client: BatchClient, served: Served, warnings_seen: list[str]) -> None:
    expected = decode_batch(make_batch(1))
    assert client.manifest(1) is not None
    damage_all_that_is_sent(served)
    assert client.samples(1, [5, 0, 5]) == [expected[5], expected[0], expected[5]]
    assert client.samples(1, []) == []
    assert not warnings_seen


def damage_all_that_is_sent(served: Served) -> None:
    for step in STEPS:
        flip_last_byte(batch_path(served.server.outbox.directory, step))


@pytest.mark.parametrize("spoil", [Path.unlink, flip_last_byte, cut_short, put_another_batch])
def test_rows_that_cannot_be_read_are_sent_and_the_reason_is_told_once(
    client: BatchClient, tmp_path: Path, warnings_seen: list[str], spoil: Callable[[Path], None]
) -> None:
    path = batch_path(tmp_path / "seen", 1)
    spoil(path)
    for _ in range(2):
        assert client.samples(1, range(8)) == decode_batch(make_batch(1))
    assert client.samples(2, range(8)) == decode_batch(make_batch(2))
    assert len(warnings_seen) == 1
    assert "samples come over the link" in warnings_seen[0]


def test_rows_that_are_damaged_in_the_outbox_itself_are_reported_with_their_path(
    served: Served, tmp_path: Path
) -> None:
    path = batch_path(tmp_path / "outbox", 1)
    flip_last_byte(path)
    with (
        BatchClient(served.endpoint, RUN, outbox=tmp_path / "outbox") as client,
        pytest.raises(RequestFailed, match=f"{path} is corrupt: row 7"),
    ):
        client.samples(1, range(8))


@pytest.mark.parametrize("sees_outbox", [True, False])
def test_steps_may_be_asked_for_in_any_order(served: Served, tmp_path: Path, sees_outbox: bool) -> None:
    """More steps than a client remembers manifests of, and back to the first."""
    outbox = tmp_path / "outbox" if sees_outbox else None
    with BatchClient(served.endpoint, RUN, outbox=outbox) as client:
        for step in [*STEPS, *STEPS]:
            assert client.samples(step, [3]) == [decode_batch(make_batch(step))[3]]
