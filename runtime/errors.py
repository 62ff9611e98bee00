"""Errors that end a process.

ServiceError          ends the process with `exit_code` and one line
├── UserError         the user can mend it: exit code 2
├── StorageError      the disk refuses: exit code 74
├── StallError        nothing moves: exit code 75
├── PeerLostError     a peer is gone: exit code 76
└── ChildDiedError    a service that `rl` started died: its exit code
"""

from runtime.exit_codes import ExitCode


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

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def find_service_error(error: BaseException) -> ServiceError | None:
    """The first `ServiceError` in `error`, which may be a group of groups."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := find_service_error(inner))), None)
    return None
