"""Errors that end a process, and the exit codes of all services.

A supervisor can tell a user's mistake from a fault by them (docs/operations.md).

ServiceError          ends the process with `exit_code` and one line
├── UserError         the user can mend it: exit code 2
├── StorageError      the disk refuses: exit code 74
├── StallError        nothing moves: exit code 75
├── PeerLostError     a peer is gone: exit code 76
└── ChildDiedError    a service that `rl` started died: its exit code
"""

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """What a process says with its exit status."""

    OK = 0
    FAILED = 1
    """An unexpected error: there is a traceback in the log."""
    USAGE = 2
    """The user's mistake (config, path, port, environment): one clear line, no traceback."""
    STORAGE = 74
    """The disk refused checkpoints or batches too often (EX_IOERR)."""
    STALLED = 75
    """Nothing moved for `stall_timeout_s`; stacks are in the log (EX_TEMPFAIL: try again)."""
    PEER_LOST = 76
    """A service this one cannot work without is gone."""
    NON_FINITE = 77
    """Loss or gradient were not finite too many steps in a row."""
    NO_SIGNAL = 78
    """The run cannot learn: no group of rollouts differs. The message has advice; a restart changes nothing."""


class ServiceError(Exception):
    """Printed as one line, without a traceback."""

    exit_code: int = ExitCode.FAILED


class UserError(ServiceError):
    """A wrong config, a missing path, a port in use, an environment that does not exist."""

    exit_code = ExitCode.USAGE


class StorageError(ServiceError):
    """The disk refused to keep what must be kept."""

    exit_code = ExitCode.STORAGE


class StallError(ServiceError):
    """No progress within the stall timeout."""

    exit_code = ExitCode.STALLED


class PeerLostError(ServiceError):
    """A peer this service depends on is gone and did not come back in time."""

    exit_code = ExitCode.PEER_LOST


class ChildDiedError(ServiceError):
    """A service that `rl` started ended before the run was over."""

    def __init__(self, message: str, exit_code: int, killed: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.killed = dict(killed or {})
        """The service by name and the name of its signal, if one killed it: `{"inference": "SIGKILL"}`."""


def find_service_error(error: BaseException) -> ServiceError | None:
    """The first `ServiceError` in `error`, which may be a group of groups."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := find_service_error(inner))), None)
    return None
