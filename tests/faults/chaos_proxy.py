"""A TCP proxy on loopback that misbehaves on demand: delay, cut, black-hole, trickle, duplicate, swap, replay.

Runs its own event loop in a thread, so that plain tests and real subprocesses can use it alike:

    with ChaosProxy(target_port) as proxy:
        client = connect(proxy.port)
        proxy.faults = Faults(black_hole=True)      # takes effect at the next chunk
        proxy.cut()                                 # resets every connection

`duplicate`, `swap` and `replay` work on whole ZMTP messages: the proxy parses the framing that follows the NULL
handshake (greeting of 64 bytes, then flags, length, body), so a peer sees valid messages twice or in another order.
They hold for connections that are made while one of them is set.
"""

import asyncio
import random
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
CHUNK_BYTES = 65536
MAX_HELD_S = 0.2
"""A message that is to change places with the next one waits so long for it."""
MAX_REMEMBERED = 64
"""Messages of one direction that `replay` draws from."""


@dataclass(frozen=True)
class Faults:
    """What happens to traffic, in both directions. Shares are probabilities per message."""

    delay_s: float = 0.0
    black_hole: bool = False
    """Connections stay open, bytes are swallowed: a half-open link."""
    trickle_bytes_per_s: int | None = None
    duplicate: float = 0.0
    """Share of ZMTP messages that are sent twice."""
    swap: float = 0.0
    """Share of ZMTP messages that change places with the next one, if that comes soon; else they are late."""
    replay: float = 0.0
    """Share of ZMTP messages after which an older one of the same direction comes again."""

    @property
    def reframes(self) -> bool:
        """Whether traffic must be parsed into ZMTP messages."""
        return self.duplicate > 0 or self.swap > 0 or self.replay > 0


class ChaosProxy:
    """One listening port in front of `target_port`. `faults` may be replaced at any time."""

    def __init__(
        self, target_port: int, *, target_host: str = "127.0.0.1", faults: Faults | None = None, seed: int = 0
    ) -> None:
        self._target = (target_host, target_port)
        self.faults = faults or Faults()
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.num_connections = 0
        self.num_faults: Counter[str] = Counter()
        """Messages that were duplicated, swapped or replayed, by the name of the fault."""

    def __enter__(self) -> "ChaosProxy":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        self._loop.call_soon_threadsafe(self._cut)

    def retarget(self, port: int) -> None:
        """Send new connections to another port."""
        self._target = (self._target[0], port)

    def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut()
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            peer_reader, peer_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, peer_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, peer_writer))
                group.create_task(self._pump(peer_reader, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # a reset on either side ends both, as a real network would
        except* asyncio.CancelledError:
            pass  # the proxy is closing
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = self._messages(reader) if self.faults.reframes else self._chunks(reader)
        async for chunk in source:
            await self._forward(chunk, writer)
        raise ConnectionResetError("peer closed")

    async def _forward(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        faults = self.faults
        if faults.black_hole:
            return
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        if faults.trickle_bytes_per_s is None:
            writer.write(chunk)
            await writer.drain()
            return
        for index in range(len(chunk)):
            writer.write(chunk[index : index + 1])
            await writer.drain()
            await asyncio.sleep(1 / faults.trickle_bytes_per_s)

    async def _chunks(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while chunk := await reader.read(CHUNK_BYTES):
            yield chunk

    async def _messages(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """The stream as whole ZMTP messages, some twice, some swapped with their successor, some long after."""
        remaining = GREETING_BYTES
        while remaining:  # peers send the greeting in parts, each waiting for the other's: pass it on as it comes
            part = await reader.read(remaining)
            if not part:
                return
            remaining -= len(part)
            yield part
        past: deque[bytes] = deque(maxlen=MAX_REMEMBERED)
        while True:
            message, is_command = await _read_message(reader)
            if is_command:
                yield message
                continue
            async for each in self._swapped(message, reader) if self._draw("swap") else _alone(message):
                yield each
            if self._draw("duplicate"):
                yield message
            if past and self._draw("replay"):
                yield self._random.choice(past)
            past.append(message)

    async def _swapped(self, message: bytes, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """`message` after the one that follows it."""
        following = asyncio.ensure_future(_read_message(reader))
        try:
            done, _ = await asyncio.wait({following}, timeout=MAX_HELD_S)
            if not done:
                yield message
            yield (await following)[0]
            if done:
                yield message
        finally:
            following.cancel()

    def _draw(self, fault: str) -> bool:
        share: float = getattr(self.faults, fault)
        happens = self._random.random() < share
        self.num_faults[fault] += happens
        return happens


async def _alone(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def _read_message(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """All frames of one message, with their framing, and whether it is a command (heartbeats, READY)."""
    parts: list[bytes] = []
    while True:
        flags = (await reader.readexactly(1))[0]
        size = await reader.readexactly(8 if flags & LONG else 1)
        body = await reader.readexactly(int.from_bytes(size, "big"))
        parts.append(bytes([flags]) + size + body)
        if flags & COMMAND:
            return b"".join(parts), True
        if not flags & MORE:
            return b"".join(parts), False
