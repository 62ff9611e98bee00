"""`Limits`: how large anything on the wire may be. Checked before sending and before decoding, on both sides."""

import msgspec


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
