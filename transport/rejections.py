"""`Rejections`: what was dropped and from whom, counted always and logged once per peer and kind."""

from collections import Counter, OrderedDict
from enum import StrEnum

from loguru import logger


class Reason(StrEnum):
    """Why something a peer sent was not served."""

    GARBAGE = "garbage"
    """Frames that are not a message of ours."""
    OVERSIZE = "oversize"
    """A frame above the limit."""
    SCHEMA = "schema"
    """A peer of another schema version."""
    RUN = "run"
    """A peer of another run, or one whose checkpoint does not fit this run."""
    KEY = "key"
    """A peer without a key on the allow-list."""
    HANDSHAKE = "handshake"
    """A connection that ended before its first message: no keys, the wrong server key, not one of ours, or a frame so
    large that libzmq cuts it off."""
    UNREACHABLE = "unreachable"
    """A reply to a peer that is gone or does not read."""
    BUSY = "busy"
    """A second request while the first is being served."""


class Rejections:
    """Counts by reason. Remembers the last `max_peers` (peer, reason) pairs, so that a flood is one line in the log."""

    def __init__(self, max_peers: int = 1024) -> None:
        self._counts: Counter[Reason] = Counter()
        self._logged: OrderedDict[tuple[str, Reason], None] = OrderedDict()
        self._max_peers = max_peers

    def add(self, reason: Reason, peer: str, detail: str) -> None:
        """Count one rejection; the first of its kind from `peer` is logged. `detail` may hold what the peer wrote."""
        self._counts[reason] += 1
        key = (peer, reason)
        if key in self._logged:
            self._logged.move_to_end(key)
            return
        self._logged[key] = None
        if len(self._logged) > self._max_peers:
            self._logged.popitem(last=False)
        text = printable(detail)
        logger.warning("rejected {} from {}: {} (more of this kind is only counted)", reason.value, peer, text)

    def counts(self) -> dict[str, int]:
        """Rejections so far, by reason."""
        return {reason.value: count for reason, count in self._counts.items()}


def printable(text: str, max_chars: int = 300) -> str:
    """What a peer wrote, fit for one line of a log: short, and without line breaks or control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:max_chars])
