"""Errors of the viewer.

UserError (runtime)
└── ViewerError         a wrong argument; exit code 2
    └── NotRecorded     the run has no such group, rollout or sequence; the page shows it, HTTP 404
"""

from runtime.errors import UserError


class ViewerError(UserError):
    """The user can mend it."""


class NotRecorded(ViewerError):
    """What was asked for is not in the files of the run."""
