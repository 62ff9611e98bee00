"""Exit codes of all services, so that a supervisor can tell a user's mistake from a fault (docs/operations.md)."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process says with its exit status."""

    OK = 0
    FAILED = 1
    """An error nobody foresaw: there is a traceback in the log."""
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
