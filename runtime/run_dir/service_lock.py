"""One process per service and run: the second is refused, and told who the first is."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

import msgspec

from runtime.errors import ChildDiedError, ExitCode, UserError, find_service_error


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a lock file: who took the lock last."""

    pid: int
    host: str
    ended: str = ""
    """How it let go (`exit 76: lost the orchestrator`). Empty while it holds the lock, or when it was killed."""
    killed: dict[str, str] = {}
    """Services that it saw die of a signal, and its name: `{"inference": "SIGKILL"}`."""


class ServiceLock:
    """Holds `flock` on `path` from construction to `release`; the system releases it when the process dies.

    Raises `UserError` with pid and host of the holder if the lock is taken. The file stays, and says how the holder
    ended: only the lock on it counts. A forked child that does not exec keeps the lock alive with its parent's
    descriptor.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise UserError(
                f"{path.stem} already runs in {path.parent.parent} ({_describe(read_holder(path))}); stop it or choose "
                "another --run.name"
            ) from None
        self._write(Holder(pid=os.getpid(), host=socket.gethostname()))

    def release(self, ended: str = "exit 0", killed: dict[str, str] | None = None) -> None:
        """Let the next one in, and leave word of how this one ended. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # a full disk: `rl doctor` will have to guess
                self._write(Holder(pid=os.getpid(), host=socket.gethostname(), ended=ended, killed=killed or {}))
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "ServiceLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(describe_end(error), error.killed if isinstance(error, ChildDiedError) else None)

    def _write(self, holder: Holder) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(holder), 0)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of this file. Leaves the file as it is; a service that starts at this very
    moment may be refused."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def record_end(path: Path, ended: str) -> None:
    """Leave word in the lock file for a holder that ends without releasing its lock. Never raises `OSError`."""
    holder = Holder(pid=os.getpid(), host=socket.gethostname(), ended=ended)
    with contextlib.suppress(OSError):
        path.write_bytes(msgspec.json.encode(holder))


def read_holder(path: Path) -> Holder | None:
    """The process that took the lock last; `None` if there was none, or if it has not written its name yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def describe_end(error: BaseException | None) -> str:
    """How a process ends that `error` leaves: exit code and reason, in one line."""
    if error is None:
        return f"exit {ExitCode.OK:d}"
    if isinstance(error, SystemExit):
        return f"exit {error.code or 0}"
    known = find_service_error(error)
    code, reason = (known.exit_code, str(known)) if known else (ExitCode.FAILED, repr(error))
    return f"exit {int(code)}: {' '.join(reason.split())}"


def _describe(holder: Holder | None) -> str:
    return "pid unknown: it has just started" if holder is None else f"pid {holder.pid} on host {holder.host}"
