"""One service that `rl` started: its process, its output, its end."""

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runtime.process.logging import LogFile

TAIL_LINES = 20
"""Last lines that are shown when a service dies."""
KILL_TIMEOUT_S = 10.0
"""Seconds to wait for a killed process that is stuck in the kernel."""
MAX_LINE_BYTES = 1 << 16
"""Longer lines are cut into pieces."""

Forward = Callable[[str, str], None]
"""Takes the name of a service and one line of its output. Called from several threads."""


class Child:
    """Starts `command` in a process group of its own, so that Ctrl-C in the terminal reaches only `rl`.

    Its output (stdout and stderr) goes line by line to `log` and to `forward`.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path, forward: Forward
    ) -> None:
        self.name = name
        self._forward = forward
        self._log = LogFile(log)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """`None` while it lives; 128 + n after signal n, as shells say it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def last_lines(self) -> list[str]:
        """The end of its output. Waits a moment for what is still in the pipe."""
        self._reader.join(timeout=1.0)
        return list(self._tail)

    def terminate(self) -> None:
        """Ask it to end. Its own children are its own business."""
        if self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its process group at once."""
        if self.exit_code is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(KILL_TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        """True if it ended within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._tail.append(line)
                self._log.write(line + "\n")
                self._forward(self.name, line)
