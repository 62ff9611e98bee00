"""Keys on disk, and the matrix of who may connect to whom.

What the sockets of `transport` must never leave to chance.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.support.fakes import Served
from tests.support.waiting import until
from tests.transport.samples import RUN, make_batch
from transport.client.client import BatchClient
from transport.errors import PeerTimeout, Refused, SecurityError
from transport.outbox.outbox import Outbox
from transport.security.exposure import check_bind, is_local
from transport.security.keys import CurveKeys, make_keys
from transport.security.sockets import dealer, router
from transport.wire.messages import Limits

NO_WAY_IN = (Refused, PeerTimeout)
"""Which side sees the mismatch first is a race inside libzmq; if it is the server, the client only sees it hang up."""

DISAGREEMENT = "do not agree on security|broke off while greeting"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def guarded(tmp_path: Path, keys: Path) -> Iterator[Served]:
    with Served(Outbox(tmp_path / "outbox", RUN), keys=CurveKeys.for_server(keys)) as served:
        served.call(served.server.publish(make_batch(1)))
        yield served


def client(served: Served, keys: CurveKeys | None) -> contextlib.AbstractContextManager[BatchClient]:
    return BatchClient(served.endpoint, RUN, keys=keys, connect_timeout_s=2, peer_timeout_s=0.7)


def test_secrets_are_for_the_owner_only(keys: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()}
    assert modes["server.secret"] == modes["client.secret"] == 0o600
    assert set(modes) == {"server.secret", "server.public", "client.secret", "client.public"}


def test_existing_keys_are_never_overwritten(keys: Path) -> None:
    before = (keys / "server.secret").read_bytes()
    with pytest.raises(SecurityError, match=r"server\.secret exists"):
        make_keys(keys)
    assert (keys / "server.secret").read_bytes() == before


def test_secret_never_shows_in_a_repr(keys: Path) -> None:
    loaded = CurveKeys.for_server(keys)
    assert loaded.secret.decode() not in repr(loaded)


def test_secret_that_others_can_read_is_refused(keys: Path) -> None:
    (keys / "client.secret").chmod(0o640)
    with pytest.raises(SecurityError, match="chmod 600"):
        CurveKeys.for_client(keys)


def test_halves_of_two_pairs_are_refused(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "server.public", keys / "server.public")
    with pytest.raises(SecurityError, match=r"server\.public and server\.secret .* are not a pair"):
        CurveKeys.for_server(keys)


def test_a_folder_with_some_of_the_keys_gets_none(keys: Path) -> None:
    (keys / "server.secret").unlink()
    with pytest.raises(SecurityError, match=r"server\.public exists"):
        make_keys(keys)
    assert not (keys / "server.secret").exists()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"~" * 40])
def test_file_without_a_key_is_refused_by_name(keys: Path, content: bytes) -> None:
    (keys / "server.public").write_bytes(content)
    with pytest.raises(SecurityError, match=r"server\.public"):
        CurveKeys.for_client(keys)


def test_missing_key_file_is_named(keys: Path) -> None:
    (keys / "client.secret").unlink()
    with pytest.raises(SecurityError, match=r"cannot read key file .*client\.secret"):
        CurveKeys.for_client(keys)
    (keys / "client.public").unlink()
    with pytest.raises(SecurityError, match=r"no client\*\.public"):
        CurveKeys.for_server(keys)


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5000", True),
        ("tcp://127.9.9.9:5000", True),
        ("tcp://localhost:5000", True),
        ("tcp://[::1]:5000", True),
        ("ipc:///tmp/socket", True),
        ("tcp://0.0.0.0:5000", False),
        ("tcp://*:5000", False),
        ("tcp://10.0.0.3:5000", False),
        ("tcp://[::]:5000", False),
        ("tcp://eth0:5000", False),
        ("tcp://127.0.0.1.example.com:5000", False),
    ],
)
def test_only_loopback_binds_without_keys(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local
    check_bind(endpoint, has_keys=True, insecure=False)
    check_bind(endpoint, has_keys=False, insecure=True)
    with contextlib.nullcontext() if local else pytest.raises(SecurityError, match="no keys"):
        check_bind(endpoint, has_keys=False, insecure=False)


def test_the_right_keys_open_the_link(guarded: Served, keys: Path) -> None:
    with client(guarded, CurveKeys.for_client(keys)) as link:
        link.hello()
        assert len(link.samples(make_batch(1).manifest, range(8))) == 8
    assert guarded.server.rejections() == {}


def test_every_client_key_in_the_folder_is_allowed(tmp_path: Path, keys: Path) -> None:
    make_keys(keys, ("client-b",))
    with Served(Outbox(tmp_path / "outbox", RUN), keys=CurveKeys.for_server(keys)) as served:
        for name in ("client", "client-b"):
            with client(served, CurveKeys.for_client(keys, name)) as link:
                assert link.hello() == 1


def test_a_key_that_is_not_on_the_list_is_refused_and_named(
    guarded: Served, keys: Path, tmp_path: Path, warnings_seen: list[str]
) -> None:
    intruder = tmp_path / "intruder"
    make_keys(intruder)
    shutil.copy(keys / "server.public", intruder / "server.public")
    own = CurveKeys.for_client(intruder)
    for _ in range(3):
        with client(guarded, own) as link, pytest.raises(Refused, match="not on the server's allow-list"):
            link.hello()
    named = [line for line in warnings_seen if "rejected key from 127.0.0.1" in line]
    assert len(named) == 1
    assert own.public.decode()[:8] in named[0]
    assert guarded.server.rejections()["key"] >= 3


def test_a_client_without_keys_gets_nothing(guarded: Served, warnings_seen: list[str]) -> None:
    with client(guarded, None) as link, pytest.raises(NO_WAY_IN, match=DISAGREEMENT):
        link.hello()
    assert guarded.server.peers() == ()
    until(lambda: any("rejected handshake" in line for line in warnings_seen), within_s=60)
    assert sum("rejected handshake" in line for line in warnings_seen) == 1


def test_a_client_with_another_servers_key_gets_nothing(guarded: Served, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "server.public", keys / "server.public")
    with client(guarded, CurveKeys.for_client(keys)) as link, pytest.raises(PeerTimeout, match=r"server\.public"):
        link.hello()
    assert guarded.server.peers() == ()
    until(lambda: guarded.server.rejections().get("handshake", 0) >= 1, within_s=60)


def test_a_client_with_keys_does_not_talk_to_a_server_without(tmp_path: Path, keys: Path) -> None:
    with Served(Outbox(tmp_path / "outbox", RUN)) as served:
        with client(served, CurveKeys.for_client(keys)) as link, pytest.raises(NO_WAY_IN, match=DISAGREEMENT):
            link.hello()
        with client(served, None) as link:
            assert link.hello() == 1


def test_refused_clients_do_not_disturb_a_welcome_one(guarded: Served, keys: Path) -> None:
    with client(guarded, CurveKeys.for_client(keys)) as link:
        link.hello()
        for _ in range(3):
            with client(guarded, None) as stranger, pytest.raises(NO_WAY_IN):
                stranger.hello()
            assert len(link.samples(make_batch(1).manifest, [0])) == 1


LIMITS = Limits(max_request_bytes=1000, max_frame_bytes=2000, queue_messages=7)


def test_server_socket_has_every_limit_set() -> None:
    with zmq.asyncio.Context() as context, router(context, None, LIMITS, 4.0) as socket:
        assert 1000 <= socket.getsockopt(zmq.MAXMSGSIZE) < 1000 + 4096
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 7
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 4000
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == 4
        assert socket.getsockopt(zmq.LINGER) == 0


def test_client_socket_has_every_limit_set() -> None:
    with zmq.Context() as context, dealer(context, None, LIMITS, 4.0) as socket:
        assert 2000 <= socket.getsockopt(zmq.MAXMSGSIZE) < 2000 + 4096
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 7
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 1000
        assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == socket.getsockopt(zmq.HEARTBEAT_TTL) == 4000
        assert socket.getsockopt(zmq.IMMEDIATE) == 1
        assert socket.getsockopt(zmq.LINGER) == 0
