"""What trainer ranks and the orchestrator say to each other (DEALER to ROUTER).

A message is a multipart ZMQ message: one msgpack head (the tagged union below), then the frames it announces.
`seq` numbers the requests of one client; a reply repeats it. Only `Samples` and `WeightBytes` carry frames.
Engines speak the same language to the weight servers of the trainer's ranks (`transport/weights/server.py`).
`kind`, `seq` and `schema_version` of `Hello`, `Welcome` and `Refusal` are the same in every schema version, so that
peers of different versions can name both.
"""

import msgspec

from transport.wire.manifest import BatchManifest
from transport.wire.sample import EncodedTensor
from transport.wire.weights import BroadcastGroup, Canary, WeightOffer


class _Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind"
):
    seq: int


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a connection. The server answers `Welcome` or `Refusal`."""

    schema_version: int
    run_id: str
    rank: int
    world_size: int
    last_committed: int
    """Newest step whose checkpoint is durable; 0 for a fresh start."""


class GetManifest(_Message, frozen=True, tag="get_manifest"):
    """Ask for batch `step`. Answered by `Manifest`, `NotReady` (ask again) or `EndOfRun`."""

    step: int


class GetSamples(_Message, frozen=True, tag="get_samples"):
    """Ask for rows `indices` (int32) of batch `step`. Answered by `Samples` with one frame per row."""

    step: int
    indices: EncodedTensor


class Trained(_Message, frozen=True, tag="trained"):
    """Rank 0 made the optimizer step(s) of batch `step`. Answered by `Ack`."""

    step: int


class Committed(_Message, frozen=True, tag="committed"):
    """A durable checkpoint contains batch `step`: the outbox may retire it and all before. Answered by `Ack`."""

    step: int


class WeightsPublished(_Message, frozen=True, tag="weights_published"):
    """Policy `version` can be loaded from `location`. Answered by `Ack`."""

    version: int
    location: str = msgspec.field(name="manifest_path")
    """Where: the path of a manifest file, or the address of another channel (`transport/wire/weights.py`)."""
    digest: str
    canary: Canary | None = None
    """What these weights say to a fixed prompt, if the trainer computed it."""


class GetWeights(_Message, frozen=True, tag="get_weights"):
    """To a weight server: what is there to fetch of policy `version`? Answered by `Weights`."""

    version: int


class GetWeightBytes(_Message, frozen=True, tag="get_weight_bytes"):
    """To a weight server: some of the bytes that it holds. Answered by `WeightBytes` with one frame.

    This is the credit: a server sends nothing that was not asked for, so what is in flight is what the engine asked.
    """

    version: int
    offset: int
    """First byte, counted over the ranges of this server, which lie end to end."""
    num_bytes: int


class GetBroadcast(_Message, frozen=True, tag="get_broadcast"):
    """To a weight server: broadcast all that it holds of `version`, once, to this engine. Answered by `Broadcast`."""

    version: int


class Ping(_Message, frozen=True, tag="ping"):
    """Heartbeat. Answered by `Pong`."""


class Bye(_Message, frozen=True, tag="bye"):
    """The client leaves on purpose. Answered by `Ack`."""

    reason: str


class Welcome(_Message, frozen=True, tag="welcome"):
    """The server accepts the client."""

    schema_version: int


class Refusal(_Message, frozen=True, tag="refusal"):
    """The server will not serve this client. `schema_version` is the server's."""

    schema_version: int
    reason: str


class Stranger(_Message, frozen=True, tag="stranger"):
    """The server does not know this connection (it restarted, or another took the rank): say `Hello` and ask again."""


class Manifest(_Message, frozen=True, tag="manifest"):
    """Batch `manifest.step` exists."""

    manifest: BatchManifest


class NotReady(_Message, frozen=True, tag="not_ready"):
    """The batch does not exist yet; `waiting_for` says what the orchestrator waits for."""

    waiting_for: str = ""


class EndOfRun(_Message, frozen=True, tag="end_of_run"):
    """The batch will never exist: the run ends before it."""


class Samples(_Message, frozen=True, tag="samples"):
    """Followed by one frame per requested row, in the order asked."""


class Weights(_Message, frozen=True, tag="weights"):
    """All that an engine must know to fetch a version."""

    offer: WeightOffer


class WeightBytes(_Message, frozen=True, tag="weight_bytes"):
    """Followed by one frame with the bytes that were asked for."""

    hash: int
    """xxh3_64 of the frame."""


class Broadcast(_Message, frozen=True, tag="broadcast"):
    """The server waits in this group, for this engine alone."""

    group: BroadcastGroup


class Ack(_Message, frozen=True, tag="ack"):
    """Done. Repeating an acknowledged message changes nothing."""


class Pong(_Message, frozen=True, tag="pong"):
    """Answer to `Ping`."""


class Failure(_Message, frozen=True, tag="failure"):
    """The request was understood and cannot be served; `reason` is for people."""

    reason: str


WeightRequest = GetWeights | GetWeightBytes | GetBroadcast
ClientMessage = Hello | GetManifest | GetSamples | Trained | Committed | WeightsPublished | WeightRequest | Ping | Bye
ServerMessage = (
    Welcome
    | Refusal
    | Stranger
    | Manifest
    | NotReady
    | EndOfRun
    | Samples
    | Weights
    | WeightBytes
    | Broadcast
    | Ack
    | Pong
    | Failure
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that both sides of a link agree on. All are in bytes unless the name says otherwise."""

    max_request_bytes: int = 4 << 20
    """Largest head that a client sends: a `GetSamples` with a million rows."""
    max_frame_bytes: int = 256 << 20
    """Largest frame that a server sends: one sample, or a manifest."""
    max_reply_bytes: int = 32 << 20
    """Sample bytes in one reply, unless it holds a single row. Small enough that a slow link delivers one reply within
    a peer timeout, since a ZeroMQ message arrives whole or not at all."""
    max_peers: int = 4096
    """Trainer ranks that one server knows."""
    queue_messages: int = 16
    """High-water mark of every socket, per peer."""
