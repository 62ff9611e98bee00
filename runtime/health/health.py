"""What a service says about itself: is it moving, and if not, what does it wait for?

starting ──ready()──▶ ok ──stopping()──▶ stopping
                      ok ──no progress() for stall_timeout_s──▶ stalled   (a view of the clock, not a transition)
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum

import msgspec

HEALTH_TIMEOUT_S = 2.0
"""Seconds that a service may take to answer `/health`."""

Fact = str | int | float | bool | None
HealthReport = Mapping[str, object]
"""The body of `/health`: facts, and `waits` as a list of `DeclaredWait`."""


class DeclaredWait(msgspec.Struct, frozen=True):
    """What one loop of a service waits for. `str` is the sentence for people; `rl doctor` reads the fields."""

    what: str
    peers: tuple[str, ...] = ()
    """Services that have to give it: a name (`trainer`) or an address (`http://127.0.0.1:8000`) each."""
    detail: str = ""
    """What the peer itself waits for, or why it did not answer."""
    loop: str = ""
    """Empty in a service with one loop."""

    def __str__(self) -> str:
        return self.brief(max_detail_chars=None)

    def brief(self, max_detail_chars: int | None) -> str:
        """The sentence, in which `(...)` stands for a detail of more characters than that, parentheses included."""
        named = f"{self.loop}: {self.what}" if self.loop else self.what
        detail = f"({self.detail})"
        is_long = max_detail_chars is not None and len(detail) > max_detail_chars
        return f"{named} {'(...)' if is_long else detail}" if self.detail else named


def read_waits(report: HealthReport) -> tuple[DeclaredWait, ...]:
    """The waits in a report. A service of the version before tells them in words only: one wait without peers."""
    try:
        return msgspec.convert(report["waits"], tuple[DeclaredWait, ...])
    except (KeyError, msgspec.ValidationError):
        words = str(report.get("waiting_for") or "")
        return (DeclaredWait(words),) if words else ()


class Status(StrEnum):
    """State of a service, as `/health` says it."""

    STARTING = "starting"
    """Loading; not yet useful (503)."""
    OK = "ok"
    """Working, or waiting within its deadline (200)."""
    STALLED = "stalled"
    """No progress for `stall_timeout_s` (503)."""
    STOPPING = "stopping"
    """Asked to end, and ending (200)."""


class Health:
    """Thread-safe. Progress is any event that proves the service moves: a step, a batch, a rollout, a loaded model.

    >>> health = Health("trainer", stall_timeout_s=900)
    >>> health.ready()
    >>> with health.waiting("batch 7 from the orchestrator", peer="orchestrator"):
    ...     pass  # blocks here
    >>> health.progress(step=7)
    """

    def __init__(self, service: str, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._status = Status.STARTING
        self._last_progress = clock()
        self._waits: dict[str, DeclaredWait] = {}
        self._facts: dict[str, Fact] = {}

    def ready(self) -> None:
        """From now on the service is `ok`: its start-up is over."""
        with self._lock:
            self._status = Status.OK
            self._last_progress = self._clock()

    def stopping(self) -> None:
        """From now on the service is `stopping`: its end has begun."""
        with self._lock:
            self._status = Status.STOPPING
            self._last_progress = self._clock()

    def progress(self, **facts: Fact) -> None:
        """Something moved; `facts` are shown in `/health` (step, version, ...)."""
        with self._lock:
            self._last_progress = self._clock()
            self._facts.update(facts)

    def set_facts(self, **facts: Fact) -> None:
        """Show `facts` in `/health`, without claiming progress."""
        with self._lock:
            self._facts.update(facts)

    def waiting_for(self, what: str, *, peer: str | Sequence[str] = (), detail: str = "", loop: str = "") -> None:
        """Say what `loop` waits for; the empty string: for nothing. The fields are those of `DeclaredWait`."""
        with self._lock:
            if what:
                peers = (peer,) if isinstance(peer, str) else tuple(peer)
                self._waits[loop] = DeclaredWait(what, peers, detail, loop)
            else:
                self._waits.pop(loop, None)

    @contextmanager
    def waiting(self, what: str, *, peer: str | Sequence[str] = (), detail: str = "", loop: str = "") -> Iterator[None]:
        """`waiting_for` as long as the block lasts."""
        self.waiting_for(what, peer=peer, detail=detail, loop=loop)
        try:
            yield
        finally:
            self.waiting_for("", loop=loop)

    @property
    def progress_age_s(self) -> float:
        """Seconds since the last progress."""
        with self._lock:
            return self._clock() - self._last_progress

    @property
    def declared_waits(self) -> tuple[DeclaredWait, ...]:
        """One for each loop that waits, sorted by the name of the loop."""
        with self._lock:
            return tuple(wait for _, wait in sorted(self._waits.items()))

    @property
    def waits(self) -> str:
        """All that this service waits for: `batch 7`, or `batcher: groups; scheduler: free slots`."""
        return _sentence(self.declared_waits)

    @property
    def status(self) -> Status:
        """State now. A stall during start-up counts too: a model that never loads is a stall."""
        if self.progress_age_s > self.stall_timeout_s:
            return Status.STALLED
        with self._lock:
            return self._status

    @property
    def is_live(self) -> bool:
        """False when a restart would help: nothing has moved for `stall_timeout_s`."""
        return self.status is not Status.STALLED

    @property
    def is_ready(self) -> bool:
        """Whether others may send work: start-up is over, the end has not begun, and it moves."""
        return self.status is Status.OK

    def report(self) -> dict[str, object]:
        """The body of `/health`. Facts cannot hide the fixed keys."""
        with self._lock:
            facts: dict[str, object] = dict(self._facts)
        waits = self.declared_waits
        return facts | {
            "service": self.service,
            "status": self.status.value,
            "progress_age_s": round(self.progress_age_s, 3),
            "waiting_for": _sentence(waits),
            "waits": [msgspec.to_builtins(wait) for wait in waits],
        }


def _sentence(waits: Sequence[DeclaredWait]) -> str:
    return "; ".join(map(str, waits))


def http_answer(url: str, timeout_s: float) -> bytes:
    """What `url` answers to GET, whatever the status. Raises `OSError` if nothing comes in time, or only a part."""
    try:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
    except http.client.HTTPException as error:  # a server that dies while it answers
        raise ConnectionError(f"the answer broke off: {error!r}") from error
    return body


def ask_health(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> tuple[HealthReport, str]:
    """The report at `url`, also that of a service that answers 503; or an empty one, and why there is none."""
    try:
        body = http_answer(url, timeout_s)
    except (OSError, ValueError) as error:  # no answer, or no URL
        return {}, f"{url}: {_reason(error)}"
    try:
        report = json.loads(body)
    except (ValueError, RecursionError):
        report = None
    return (report, "") if isinstance(report, dict) else ({}, f"{url} answers with something else than a report")


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return (inner.strerror if isinstance(inner, OSError) else None) or str(inner) or type(inner).__name__
