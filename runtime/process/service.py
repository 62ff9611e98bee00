"""`run_main`: runs a service; the one place that turns errors into exit codes."""

import errno
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from loguru import logger

from runtime.base.printable import printable
from runtime.errors import ExitCode, ServiceError, StorageError, UserError, find_service_error
from runtime.process.logging import PRINTED, start_logging

Main = Callable[[Sequence[str]], int | None]
"""A service: takes its arguments, returns its exit code (`None` is 0) or raises."""
_DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def run_main(prog: str, function: Main, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `function` and end the process, with one of `runtime.errors`.

    A `ServiceError`, also inside the group that a `TaskGroup` raises, is one line on stderr and in the log, without
    a traceback; so is a disk that refuses (full, read-only, broken), or a file that this user may not touch, where
    nothing handles it, at start-up for example.
    Anything else is a bug: its traceback is logged, exit code 1.
    """
    start_logging()
    try:
        code = function(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        raise SystemExit(_report(prog, error)) from None
    raise SystemExit(code or ExitCode.OK)


def _report(prog: str, error: Exception) -> int:
    known = find_service_error(error) or _disk_error(error)
    if known is None:
        logger.opt(exception=error).critical(f"{prog} failed: {error!r}")
        return ExitCode.FAILED
    message = printable(" ".join(str(known).split()))
    sys.stderr.write(f"{prog}: {message}\n")
    logger.bind(**PRINTED).error(message)
    return known.exit_code


def _disk_error(error: BaseException) -> ServiceError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := _disk_error(inner))), None)
    if isinstance(error, PermissionError) and error.filename is not None:
        return UserError(f"this user may not touch {error.filename}: {error.strerror}")
    refused = isinstance(error, OSError) and error.errno in _DISK_REFUSES
    return StorageError(f"the disk refuses to be written: {error}") if refused else None
