"""`WeightServer`: serves the versions in a trainer rank's `WeightStore` to engines over ZeroMQ.

    with WeightServer("tcp://127.0.0.1:0", "run", store) as server:     # a thread with an event loop of its own
        store.put(offer, data)                                          # from now on it can be fetched
        server.check()                                                  # raises if the thread has died

Engines ask, the server answers from memory: it waits for no engine and queues nothing, so a slow, frozen or dead engine
costs the trainer nothing. Who may ask is decided as at the batch server: keys and allow-list, or loopback only.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import TracebackType

import xxhash

from transport.errors import TransportError, WeightsError
from transport.security.exposure import check_bind, missing_keys_reminder, reminding_of_exposure
from transport.security.keys import CurveKeys
from transport.server.request_handler import Reply, foreign
from transport.server.router import Incoming, Reason, Router
from transport.wire.manifest import SCHEMA_VERSION
from transport.wire.messages import (
    Ack,
    Broadcast,
    Bye,
    ClientMessage,
    Failure,
    GetBroadcast,
    GetWeightBytes,
    GetWeights,
    Hello,
    Limits,
    Ping,
    Pong,
    Refusal,
    ServerMessage,
    Stranger,
    WeightBytes,
    Weights,
    Welcome,
)
from transport.wire.sample import Buffer
from transport.wire.weights import BroadcastGroup, WeightOffer


class WeightStore:
    """Holds at most `keep` versions: what was put last. Written by the trainer, read by the server's thread."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[int, tuple[WeightOffer, Buffer]] = {}

    def put(self, offer: WeightOffer, data: Buffer) -> None:
        """Offer a version, in the place of an older publish of it, and forget the oldest beyond `keep`.

        `data` are the ranges of this rank, end to end; they must not change any more.
        """
        with self._lock:
            self._versions.pop(offer.manifest.version, None)
            self._versions[offer.manifest.version] = (offer, data)
            while len(self._versions) > self._keep:
                del self._versions[next(iter(self._versions))]

    def offer(self, version: int) -> WeightOffer:
        """Raises `WeightsError`, naming what there is."""
        return self._find(version)[0]

    def read(self, version: int, offset: int, num_bytes: int) -> memoryview:
        """A view of some of the bytes. Raises `WeightsError` if this rank does not hold them all."""
        data = self.all(version)
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > data.nbytes:
            raise WeightsError(f"bytes {offset} to {offset + num_bytes} are not held here: there are {data.nbytes}")
        return data[offset : offset + num_bytes]

    def all(self, version: int) -> memoryview:
        """A view of all bytes that this rank holds of a version."""
        return memoryview(self._find(version)[1])

    def _find(self, version: int) -> tuple[WeightOffer, Buffer]:
        with self._lock:
            if version not in self._versions:
                raise WeightsError(f"version {version} is not held here (any more): there are {list(self._versions)}")
            return self._versions[version]


_START_S = 30.0
_JOIN_S = 10.0
OpenGroup = Callable[[memoryview], BroadcastGroup]
"""Begin to broadcast these bytes in a group of two, without waiting. Raises `WeightsError` if it cannot."""


class WeightServer:
    """Serves `store` of run `run_id` on `endpoint` (port 0: any free one; `endpoint` says which after entering).

    `SecurityError` at once if `endpoint` is reachable from other machines and there are neither `keys` nor `insecure`.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        store: WeightStore,
        *,
        keys: CurveKeys | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        peer_timeout_s: float = 3.0,
        open_group: OpenGroup | None = None,
    ) -> None:
        check_bind(endpoint, has_keys=keys is not None, insecure=insecure)
        self.endpoint = endpoint
        self._run_id = run_id
        self._store = store
        self._open_group = open_group
        self._keys = keys
        self._limits = limits or Limits()
        self._peer_timeout_s = peer_timeout_s
        self._engines: OrderedDict[bytes, None] = OrderedDict()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="weight server", daemon=True)

    def __enter__(self) -> "WeightServer":
        """Bind and serve. `BindError` if the address is taken."""
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise WeightsError(f"the weight server did not start within {_START_S:g} s")
        if isinstance(self._failure, TransportError):
            raise self._failure
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended by itself
                self._stop()
        self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Raise `WeightsError` if the thread of the server has died."""
        if self._failure is not None or not self._thread.is_alive():
            raise WeightsError(f"the weight server at {self.endpoint} has died: {self._failure!r}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:  # by `__exit__`
            pass
        except BaseException as error:  # whatever it was: the next publish raises it
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        router = Router(self._keys, self._limits, self._peer_timeout_s)
        self.endpoint = router.bind(self.endpoint)
        serving = asyncio.current_task()
        assert serving is not None
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, serving.cancel)
        self._ready.set()
        reminder = missing_keys_reminder(self.endpoint, has_keys=self._keys is not None)
        try:
            with reminding_of_exposure(reminder):
                async with asyncio.TaskGroup() as tasks:
                    router.start_guards(tasks)
                    tasks.create_task(self._answer_all(router))
        finally:
            router.close()

    async def _answer_all(self, router: Router) -> None:
        while True:
            incoming = await router.receive()
            if incoming is not None:
                reply, frames = self._answer(incoming)
                if isinstance(reply, Refusal):
                    router.rejections.add(Reason.RUN, incoming.address, reply.reason)
                await router.send(incoming.identity, incoming.address, reply, frames)
            await asyncio.sleep(0)  # a flood of ready messages must not starve the guards

    def _answer(self, incoming: Incoming) -> Reply:
        message = incoming.message
        if isinstance(message, Hello):
            return self._greet(incoming.identity, message), []
        if incoming.identity not in self._engines:
            return Stranger(seq=message.seq), []
        if isinstance(message, Bye):
            del self._engines[incoming.identity]
            return Ack(seq=message.seq), []
        try:
            return answer_engine(self._store, self._limits, message, self._open_group)
        except WeightsError as error:
            return Failure(seq=message.seq, reason=str(error)), []

    def _greet(self, identity: bytes, hello: Hello) -> ServerMessage:
        """Of a greeting, only schema and run matter here: an engine has no rank."""
        reason = foreign(self._run_id, hello)
        if reason is not None:
            return Refusal(seq=hello.seq, schema_version=SCHEMA_VERSION, reason=reason)
        self._engines[identity] = None
        if len(self._engines) > self._limits.max_peers:
            self._engines.popitem(last=False)
        return Welcome(seq=hello.seq, schema_version=SCHEMA_VERSION)


def answer_engine(
    store: WeightStore, limits: Limits, message: ClientMessage, open_group: OpenGroup | None = None
) -> Reply:
    """The answer to an engine that was greeted. Raises `WeightsError` for what is not held here."""
    match message:
        case GetWeights(seq=seq, version=version):
            return Weights(seq=seq, offer=store.offer(version)), []
        case GetWeightBytes(num_bytes=num_bytes) if num_bytes > limits.max_reply_bytes:
            raise WeightsError(f"{num_bytes} bytes at once, the limit is {limits.max_reply_bytes}")
        case GetWeightBytes(seq=seq, version=version, offset=offset, num_bytes=num_bytes):
            data = store.read(version, offset, num_bytes)
            return WeightBytes(seq=seq, hash=xxhash.xxh3_64_intdigest(data)), [data]
        case GetBroadcast(seq=seq, version=version) if open_group is not None:
            return Broadcast(seq=seq, group=open_group(store.all(version))), []
        case Ping(seq=seq):
            return Pong(seq=seq), []
        case other:
            return Failure(seq=other.seq, reason="this weight server has no such thing"), []
