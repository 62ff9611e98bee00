"""What the orchestrator and an environment worker say to each other, over a socket pair that only they have.

    orchestrator ──Load──▶ worker ──Ready | LoadRefused──▶
    orchestrator ──Run, Stop──▶ worker ──RolloutsDone | Broken──▶  one rollout, or one joint group
    worker ──Ask | AskChat, Drop──▶ orchestrator                   one generation, by the engines of the orchestrator
    orchestrator ──Answer | ChatAnswer | NoAnswer──▶ worker
    worker ──Beat──▶                                               every `BEAT_S`, while its event loop turns

A frame is four bytes of length (little-endian) and a msgpack message. Arrays travel as `EncodedTensor`s. What an
environment puts into the messages of a rollout is its own affair: what msgpack does not know is sent as text.
"""

import asyncio
import socket
import time
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from orchestrator.engines.protocol import ChatAsk, ChatReply
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.errors import WorkerLinkError
from orchestrator.values.rollout import Rollout, RolloutFailure
from transport.errors import CodecError
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import Array, EncodedTensor

MAX_FRAME_BYTES = 256 * 2**20
"""A longer frame ends the worker that sends it."""
HEAD_BYTES = 4
BEAT_S = 1.0
"""Seconds between two signs of life of a worker's event loop."""


class _WorkerMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"
):
    pass


class Load(_WorkerMessage, frozen=True, tag="load"):
    """First message. `env` is an `EnvConfig` as JSON, `search_path` the `sys.path` of the orchestrator."""

    env: bytes
    model_path: str | None
    """Folder of the tokenizer, if there is one."""
    is_chat: bool
    """Whether the model is asked with messages (`ChatModel`), and not with tokens."""
    search_path: tuple[str, ...]


class RunRollouts(_WorkerMessage, frozen=True, tag="run"):
    """Play `request`, whose example's payload is a position in the environment's examples."""

    id: int
    request: RolloutRequest


class Stop(_WorkerMessage, frozen=True, tag="stop"):
    """The result of run `id` is not needed any more: cancel it."""

    id: int


class Answer(_WorkerMessage, frozen=True, tag="answer"):
    """The engines' reply to `Ask`."""

    id: int
    reply: GenerateReply


class ChatAnswer(_WorkerMessage, frozen=True, tag="chat_answer"):
    """The model's reply to `AskChat`."""

    id: int
    reply: ChatReply


class NoAnswer(_WorkerMessage, frozen=True, tag="no_answer"):
    """The engines failed `Ask`; `is_invalid`: they answered with what must not be trained on."""

    id: int
    reason: str
    is_invalid: bool


class Ready(_WorkerMessage, frozen=True, tag="ready"):
    """The environment is loaded and started."""

    example_ids: tuple[str, ...]
    scores_jointly: bool


class LoadRefused(_WorkerMessage, frozen=True, tag="refused"):
    """The environment cannot be loaded; the worker ends."""

    reason: str


class Ask(_WorkerMessage, frozen=True, tag="ask"):
    """Sample this. `id` numbers the worker's own questions."""

    id: int
    request: GenerateRequest


class AskChat(_WorkerMessage, frozen=True, tag="ask_chat"):
    """Asks the orchestrator for the next turn of a conversation."""

    id: int
    request: ChatAsk


class Drop(_WorkerMessage, frozen=True, tag="drop"):
    """The answer to `Ask` is not needed any more."""

    id: int


class RolloutsDone(_WorkerMessage, frozen=True, tag="done"):
    """Run `id` has ended, with these results."""

    id: int
    results: tuple[Rollout | RolloutFailure, ...]


class Broken(_WorkerMessage, frozen=True, tag="broken"):
    """Run `id` shows that the config asks for what the environment does not have: no run will do better."""

    id: int
    reason: str


class Beat(_WorkerMessage, frozen=True, tag="beat"):
    """The worker's event loop turns."""


ToWorker = Load | RunRollouts | Stop | Answer | ChatAnswer | NoAnswer
FromWorker = Ready | LoadRefused | Ask | AskChat | Drop | RolloutsDone | Broken | Beat

_T = TypeVar("_T")


def _encode_foreign(value: Any) -> EncodedTensor | str:
    return EncodedTensor.of(value) if isinstance(value, np.ndarray) else str(value)


def _decode_array(kind: Any, value: Any) -> Array:
    """The array of type `kind` (`numpy.ndarray[shape, numpy.dtype[scalar]]`). It is a copy: it keeps no frame alive."""
    array = msgspec.convert(value, EncodedTensor).numpy()
    (scalar,) = get_args(get_args(kind)[1])
    if array.dtype != scalar:
        raise ValueError(f"an array of {array.dtype} in the place of one of {np.dtype(scalar)}")
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_foreign)
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker, dec_hook=_decode_array)


def encode_frame(message: msgspec.Struct) -> bytes:
    """Head and body. Raises `WorkerLinkError` if the message cannot be encoded, or is larger than the other side
    accepts."""
    try:
        body = _encoder.encode(message)
    except (CodecError, ValueError, OverflowError, RecursionError) as error:
        raise WorkerLinkError(f"a message cannot be sent: {error}") from error
    return frame_head(len(body)) + body


def frame_head(num_bytes: int) -> bytes:
    """The head of a body of that size. Raises `WorkerLinkError`."""
    check_size(num_bytes)
    return num_bytes.to_bytes(HEAD_BYTES, "little")


def check_size(num_bytes: int) -> int:
    """`num_bytes`, if a frame may have as many. Raises `WorkerLinkError`."""
    if num_bytes > MAX_FRAME_BYTES:
        raise WorkerLinkError(f"a message of {num_bytes} bytes is larger than {MAX_FRAME_BYTES}")
    return num_bytes


def decode_frame(decoder: "msgspec.msgpack.Decoder[_T]", body: bytes) -> _T:
    """Raises `WorkerLinkError` for what is not a message."""
    try:
        return decoder.decode(body)
    except (CodecError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WorkerLinkError(f"a message does not decode: {error}") from error


T = TypeVar("T")


class FrameLink(Generic[T]):
    """Reads messages of type `T`. Writing never waits: what is unread is bounded by the rollouts in flight."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: "msgspec.msgpack.Decoder[T]"
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, end: socket.socket, decoder: "msgspec.msgpack.Decoder[T]") -> "FrameLink[T]":
        """Takes the socket over: it is closed with the link."""
        end.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Lost if the other side is gone. Raises `WorkerLinkError` for a message that is too large."""
        frame = encode_frame(message)
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def receive(self) -> T | None:
        """The next message; `None` when the other side is gone. Raises `WorkerLinkError`."""
        try:
            head = await self._reader.readexactly(HEAD_BYTES)
            body = await self._reader.readexactly(check_size(int.from_bytes(head, "little")))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return decode_frame(self._decoder, body)

    async def hang_up(self) -> None:
        """Close at once: what the other side has not read yet, because it is blocked, is not waited for. Idempotent."""
        self._writer.transport.abort()
        await self.close()

    async def close(self) -> None:
        """Waits until everything is sent. Idempotent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the other side was first


def receive_blocking(end: socket.socket, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float | None = None) -> T:
    """The next message. Raises `WorkerLinkError` when it does not come in time, or not at all."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        head = _read_exactly(end, HEAD_BYTES, deadline)
        body = _read_exactly(end, check_size(int.from_bytes(head, "little")), deadline)
    except TimeoutError:
        raise WorkerLinkError(f"it said nothing for {timeout_s:g} s") from None
    except OSError as error:
        raise WorkerLinkError(f"it hung up: {error}") from error
    return decode_frame(decoder, body)


def _read_exactly(end: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        end.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
        piece = end.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            raise WorkerLinkError("it hung up")
        data += piece
    return bytes(data)
