"""What can go wrong between services.

TransportError
├── CodecError          bytes that are not a valid message, sample or manifest
│   └── CorruptFrame    valid shape, wrong hash: the bytes changed on the way or on the disk
├── SchemaMismatch      the peer speaks another SCHEMA_VERSION
├── Refused             the peer will not talk to us (wrong run, wrong key, wrong version)
├── RequestFailed       the peer understood the request and cannot serve it
├── PeerTimeout         a peer did not answer within its deadline
├── LinkDown            one connection has failed; the client makes another (callers never see it)
├── SecurityError       keys that are missing, unsafe or needed
├── BindError           the address cannot be bound (port in use, say)
├── FrameTooLarge       a frame above the configured limit, seen before it is sent or decoded
├── OutboxError         a batch could not be stored or read back
│   └── OutboxVersionError  the batch was written by another version of tandem-rl: no retry helps
└── WeightsError        a weight manifest or shard is missing, torn or corrupt
"""


class TransportError(Exception):
    """Base of everything this package raises on purpose."""


class CodecError(TransportError):
    """Bytes that do not decode to what was expected."""


class CorruptFrame(CodecError):
    """A frame whose hash differs from the one its manifest promises."""


class SchemaMismatch(TransportError):
    """Two peers with different `SCHEMA_VERSION`s met."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(
            f"schema version mismatch: this side speaks {ours}, the peer {theirs}; install the same tandem-rl on both"
        )
        self.ours = ours
        self.theirs = theirs


class Refused(TransportError):
    """The peer answered, and will not serve us."""


class RequestFailed(TransportError):
    """The peer understood the request and cannot serve it."""


class LinkDown(TransportError):
    """One connection has failed; a new one may work."""


class SecurityError(TransportError, ValueError):
    """Keys that are missing, unsafe or needed. A `ValueError`, so that a config can check, too."""


class BindError(TransportError):
    """The address cannot be bound."""


class PeerTimeout(TransportError):
    """A peer did not answer in time."""


class FrameTooLarge(TransportError):
    """A frame above the limit."""


class OutboxError(TransportError):
    """A batch could not be stored or read back."""


class OutboxVersionError(OutboxError):
    """A batch of another `SCHEMA_VERSION`."""


class WeightsError(TransportError):
    """A weight publish that must not be loaded."""
