"""Errors of the viewer.

UserError (runtime)
└── ViewerError         a wrong argument; exit code 2
    ├── NotRecorded     the run has no such group, rollout or sequence; the page shows it, HTTP 404
    └── Unreadable      the disk refuses the files of the run, or the index of them; HTTP 503
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import UserError


class ViewerError(UserError):
    """A wrong argument, which the user can mend."""


class NotRecorded(ViewerError):
    """What was asked for is not in the files of the run."""


class Unreadable(ViewerError):
    """Rights, a full disk, a file that went away."""


@contextmanager
def reading() -> Iterator[None]:
    """Turns whatever disk and index refuse in the block into `Unreadable`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise Unreadable(f"the files of the run cannot be read: {error}") from error
