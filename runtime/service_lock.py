"""One process per service and run: the second is refused, and told who the first is."""

import fcntl
import json
import os
import socket
from pathlib import Path
from types import TracebackType

from runtime.errors import UserError


class ServiceLock:
    """Holds `flock` on `path` from construction to `release`; the system releases it when the process dies.

    Raises `UserError` with pid and host of the holder if the lock is taken. The file stays: only the lock on it counts.
    A forked child that does not exec keeps the lock alive with its parent's descriptor.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(os.read(self._descriptor, 4096))
            os.close(self._descriptor)
            raise UserError(
                f"{path.stem} already runs in {path.parent.parent} ({holder}); stop it or choose another --run.name"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "ServiceLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _describe_holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"pid {holder['pid']} on host {holder['host']}"
    except (ValueError, KeyError, TypeError):  # the holder locked the file and did not write its name yet
        return "pid unknown: it has just started"
