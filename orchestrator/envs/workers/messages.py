"""What the orchestrator and an environment worker say to each other, over a socket pair that only they have.

    orchestrator ──Load──▶ worker ──Ready | Refused──▶
    orchestrator ──Run, Stop──▶ worker ──Done | Broken──▶          one rollout, or one joint group
    worker ──Ask | AskChat, Drop──▶ orchestrator                   one generation, by the engines of the orchestrator
    orchestrator ──Answer | ChatAnswer | NoAnswer──▶ worker
    worker ──Beat──▶                                               every `BEAT_S`, while its event loop turns

A frame is four bytes of length (little-endian) and a msgpack message. Arrays travel as `EncodedTensor`s. What an
environment puts into the messages of a rollout is its own affair: what msgpack does not know is sent as text.
"""

from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from orchestrator.engines.chat_model import ChatAsk, ChatReply
from orchestrator.envs.protocol import RolloutRequest
from orchestrator.errors import WorkerLinkError
from orchestrator.rollout import Failure, Rollout
from transport.errors import CodecError
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.tensor import Array, EncodedTensor

MAX_FRAME_BYTES = 256 * 2**20
"""A longer frame ends the worker that sends it."""
HEAD_BYTES = 4
BEAT_S = 1.0
"""Seconds between two signs of life of a worker's event loop."""


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"
):
    pass


class Load(_Message, frozen=True, tag="load"):
    """First message. `env` is an `EnvConfig` as JSON, `search_path` the `sys.path` of the orchestrator."""

    env: bytes
    model_path: str | None
    """Folder of the tokenizer, if there is one."""
    is_chat: bool
    """Whether the model is asked with messages (`ChatModel`), and not with tokens."""
    search_path: tuple[str, ...]


class Run(_Message, frozen=True, tag="run"):
    """Play `request`, whose example's payload is a position in the environment's examples."""

    id: int
    request: RolloutRequest


class Stop(_Message, frozen=True, tag="stop"):
    """Nobody waits for run `id` any more: cancel it."""

    id: int


class Answer(_Message, frozen=True, tag="answer"):
    """The engines' reply to `Ask`."""

    id: int
    reply: GenerateReply


class ChatAnswer(_Message, frozen=True, tag="chat_answer"):
    """The model's reply to `AskChat`."""

    id: int
    reply: ChatReply


class NoAnswer(_Message, frozen=True, tag="no_answer"):
    """The engines failed `Ask`; `is_invalid`: they answered with what must not be trained on."""

    id: int
    reason: str
    is_invalid: bool


class Ready(_Message, frozen=True, tag="ready"):
    """The environment is loaded and started."""

    example_ids: tuple[str, ...]
    scores_jointly: bool


class Refused(_Message, frozen=True, tag="refused"):
    """The environment cannot be loaded; the worker ends."""

    reason: str


class Ask(_Message, frozen=True, tag="ask"):
    """Sample this. `id` numbers the worker's own questions."""

    id: int
    request: GenerateRequest


class AskChat(_Message, frozen=True, tag="ask_chat"):
    """Continue this conversation."""

    id: int
    request: ChatAsk


class Drop(_Message, frozen=True, tag="drop"):
    """The answer to `Ask` is not needed any more."""

    id: int


class Done(_Message, frozen=True, tag="done"):
    """Run `id` has ended."""

    id: int
    results: tuple[Rollout | Failure, ...]


class Broken(_Message, frozen=True, tag="broken"):
    """Run `id` shows that the config asks for what the environment does not have: no run will do better."""

    id: int
    reason: str


class Beat(_Message, frozen=True, tag="beat"):
    """The worker's event loop turns."""


ToWorker = Load | Run | Stop | Answer | ChatAnswer | NoAnswer
FromWorker = Ready | Refused | Ask | AskChat | Drop | Done | Broken | Beat

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
