"""`Link`: asks a server and gets an answer, through restarts of the server and breaks of the connection.

One request is in flight at a time. A server that says nothing for `peer_timeout_s`, or whose connection breaks, gets a
new connection after a jittered back-off, a new `Hello`, and the same request again: requests are idempotent.

Between calls, a thread sends heartbeats over the same socket, under the same lock, so that a rank in a long training
step does not look dead; and it listens for the answers, so that a server that froze, or whose connection is half open,
is noticed and greeted anew without a request. Heartbeats go out while a request waits, too: any answer is a sign of
life. A large reply keeps everything behind it waiting on a slow link, so each silence that ends a request makes the
link more patient with the next try; otherwise the same reply would be cut off for ever.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from loguru import logger

from transport.backoff import Backoff
from transport.client.connection import Connection, Received
from transport.errors import FrameTooLarge, LinkDown, PeerTimeout, Refused, SchemaMismatch, TransportError
from transport.security.keys import CurveKeys
from transport.wire.codec import encode
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import Bye, ClientMessage, Hello, Limits, Ping, Refusal, Stranger, Welcome

_T = TypeVar("_T")

_BACKOFF = Backoff(0.05, 2.0, jitter=(0.5, 1.5))
_FAREWELL_S = 1.0
_MAX_PATIENCE_S = 60.0
"""Longest silence after which a peer still counts as alive, and the longest that a server which shows signs of life may
take over one request."""
_MAX_REASONS = 3


class Link:
    """`introduce(seq)` makes the `Hello` of each new connection; `on_wait` hears what a blocked call waits for.

    `on_link` hears, from any thread, what is wrong with the connection, and the empty string once nothing is any more.
    """

    def __init__(
        self,
        endpoint: str,
        introduce: Callable[[int], Hello],
        *,
        keys: CurveKeys | None,
        limits: Limits,
        peer_timeout_s: float,
        heartbeat_s: float,
        on_wait: Callable[[str], None],
        on_link: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._introduce = introduce
        self._keys = keys
        self._limits = limits
        self._peer_timeout_s = self._patience_s = peer_timeout_s
        self._heartbeat_s = heartbeat_s
        self._on_wait = on_wait
        self._on_link = on_link
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: Connection | None = None
        self._is_welcome = False
        self._is_wanted = False
        self._problem: str | None = None
        self._heard_at = self._pinged_at = 0.0
        self._seq = itertools.count(1)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heartbeat.start()

    def connect(self, timeout_s: float) -> None:
        """Greet the server. `Refused` or `SchemaMismatch` if it will not serve us, `PeerTimeout` if it is not there."""
        with self._lock:
            self._persist(self._connected, timeout_s)

    def ask(self, make: Callable[[int], ClientMessage], timeout_s: float) -> Received:
        """The server's answer to the message that `make(seq)` builds; `PeerTimeout` if it is away for `timeout_s`."""
        message = make(next(self._seq))
        if (size := len(encode(message))) > self._limits.max_request_bytes:
            raise FrameTooLarge(f"a request of {size} bytes, the limit is {self._limits.max_request_bytes}")
        with self._lock:
            return self._persist(lambda deadline: self._answer(message, deadline), timeout_s)

    def close(self, reason: str) -> None:
        """Say goodbye to a server that is there, stop the heartbeats and drop the connection. Never raises. A call that
        is blocked in another thread ends with `PeerTimeout`."""
        self._closing.set()
        self._heartbeat.join()
        with self._lock:
            with contextlib.suppress(TransportError):  # a server that is gone needs no goodbye
                if self._connection is not None and self._is_welcome:
                    bye = Bye(seq=next(self._seq), reason=reason)
                    self._exchange(self._connection, bye, time.monotonic() + _FAREWELL_S, _FAREWELL_S)
            self._drop()
        self._context.term()

    def _persist(self, action: Callable[[float], _T], timeout_s: float) -> _T:
        """Repeat `action(deadline)` over new connections until it works or `timeout_s` have passed."""
        deadline = time.monotonic() + timeout_s
        reasons: dict[str, None] = {}
        num_failures = 0
        while True:
            if self._closing.is_set():
                raise PeerTimeout(f"the link to {self._endpoint} was closed meanwhile")
            try:
                result = action(deadline)
                self._note("")
                return result
            except LinkDown as down:
                if self._closing.is_set():  # the connection, if it is still there, is left for the goodbye
                    raise PeerTimeout(f"the link to {self._endpoint} was closed meanwhile") from down
                self._drop()
                self._note(str(down))
                reasons[str(down)] = None
                num_failures += 1
                pause_s = _BACKOFF.pause_s(num_failures)
                if time.monotonic() + pause_s >= deadline:
                    why = "; ".join(list(reasons)[-_MAX_REASONS:])
                    raise PeerTimeout(f"no answer from {self._endpoint} for {timeout_s:g} s: {why}") from down
                self._on_wait(str(down))
            except TransportError:
                self._drop()
                self._is_wanted = False  # a server that refuses us is not to be greeted every second
                raise
            self._closing.wait(pause_s)

    def _answer(self, message: ClientMessage, deadline: float) -> Received:
        connection = self._connected(deadline)
        started = time.monotonic()
        try:
            received = self._exchange(connection, message, deadline, self._patience_s)
        except LinkDown:
            if time.monotonic() - started >= self._peer_timeout_s / 2:  # libzmq may lose patience a little earlier
                self._patience_s = min(2 * self._patience_s, max(_MAX_PATIENCE_S, self._peer_timeout_s))
            raise
        self._patience_s = self._peer_timeout_s
        return received

    def _connected(self, deadline: float) -> Connection:
        connection = self._opened()
        if not self._is_welcome:
            self._greet(connection, deadline)
            self._is_welcome = True
        return connection

    def _opened(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(self._context, self._endpoint, self._keys, self._limits, self._patience_s)
            self._heard_at = self._pinged_at = time.monotonic()
            self._is_wanted = True
        return self._connection

    def _greet(self, connection: Connection, deadline: float) -> None:
        reply, _ = self._exchange(connection, self._introduce(next(self._seq)), deadline, self._peer_timeout_s)
        if isinstance(reply, Welcome | Refusal) and reply.schema_version != SCHEMA_VERSION:
            raise SchemaMismatch(SCHEMA_VERSION, reply.schema_version)
        if isinstance(reply, Refusal):
            raise Refused(f"{self._endpoint} refuses us: {reply.reason}")
        if not isinstance(reply, Welcome):
            raise LinkDown(f"{self._endpoint} answered Hello with {type(reply).__name__}")

    def _exchange(self, connection: Connection, message: ClientMessage, deadline: float, patience_s: float) -> Received:
        """The answer to `message`. `LinkDown` after `patience_s` of silence, or when the answer takes too long."""
        sent_at = time.monotonic()
        deadline = min(deadline, sent_at + max(patience_s, _MAX_PATIENCE_S))
        self._send(connection, message, min(deadline, sent_at + patience_s))
        self._heard_at = time.monotonic()
        while (now := time.monotonic()) < min(deadline, self._heard_at + patience_s):
            received = connection.receive(min(deadline, self._heard_at + patience_s, now + self._heartbeat_s))
            if received is None:
                self._raise_if_closing(message)
                self._send_ping(connection)
                continue
            self._heard_at = time.monotonic()
            if isinstance(received[0], Stranger) and not isinstance(message, Hello):
                raise LinkDown(f"{self._endpoint} restarted and does not know this rank")
            if received[0].seq == message.seq:
                return received
        raise LinkDown(f"{self._endpoint} did not answer {type(message).__name__} in {now - sent_at:.1f} s")

    def _send(self, connection: Connection, message: ClientMessage, deadline: float) -> None:
        """`on_wait` is called every second, so that a caller can end the wait for a server that is not there."""
        data = encode(message)
        while not connection.send(data, min(deadline, time.monotonic() + self._heartbeat_s)):
            self._raise_if_closing(message)
            if time.monotonic() >= deadline:
                raise LinkDown(f"{self._endpoint} did not accept the connection in time")
            self._on_wait(f"{self._endpoint} to accept the connection")

    def _raise_if_closing(self, message: ClientMessage) -> None:
        if self._closing.is_set() and not isinstance(message, Bye):
            raise LinkDown("the link is being closed")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._is_welcome = None, False

    def _note(self, problem: str) -> None:
        """Tell of a change: the connection was lost, or is back."""
        if problem and not self._problem:
            logger.warning("lost {}: {}", self._endpoint, problem)
        elif self._problem and not problem:
            logger.info("{} is back", self._endpoint)
        if problem != self._problem:
            self._problem = problem
            self._on_link(problem)

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat_s):
            if not self._lock.acquire(blocking=False):
                continue  # a request is under way, which is heartbeat enough
            try:
                if self._is_wanted:
                    self._ping()
            except TransportError as error:
                self._drop()  # the next beat connects again; the next request reports what is wrong
                self._note(str(error))
            finally:
                self._lock.release()

    def _ping(self) -> None:
        """Never blocks. A server that restarted or fell silent meanwhile gets a new connection and a new greeting."""
        connection = self._opened()
        while (received := connection.try_receive()) is not None:
            self._heard_at = max(self._heard_at, self._pinged_at)  # it answered that beat, at some time since
            if isinstance(received[0], Stranger | Welcome):
                self._is_welcome = isinstance(received[0], Welcome)
            if self._is_welcome:
                self._note("")
        now = time.monotonic()
        if now - self._heard_at >= self._peer_timeout_s:
            raise LinkDown(f"{self._endpoint} has not answered a heartbeat for {now - self._heard_at:.1f} s")
        if self._send_ping(connection):
            self._pinged_at = now

    def _send_ping(self, connection: Connection) -> bool:
        """A heartbeat, or a greeting where there was none yet. Never blocks."""
        seq = next(self._seq)
        message = Ping(seq=seq) if self._is_welcome else self._introduce(seq)
        return connection.try_send(encode(message))
