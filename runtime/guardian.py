"""A small process that outlives a killed `rl`, and ends what it left behind.

`python -m runtime.guardian COOKIE GRACE_S` waits for the end of its standard input, which comes when `rl` ends in any
way, kill -9 included. Then it ends all processes that carry the cookie. It ignores the signals of the terminal.
"""

import signal
import subprocess
import sys
from types import TracebackType

from runtime.launch_cookie import end_marked


class Guardian:
    """Runs the guardian process as long as the block lasts; leaving the block sweeps, too."""

    def __init__(self, cookie: str, grace_s: float) -> None:
        self._command = [sys.executable, "-m", "runtime.guardian", cookie, str(grace_s)]
        self._grace_s = grace_s

    def __enter__(self) -> "Guardian":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=self._grace_s + 30)


def main(argv: list[str]) -> None:
    """Wait for the end of standard input, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(argv[0], grace_s=float(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
