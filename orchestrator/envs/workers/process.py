"""`WorkerProcess`: a child process that holds one environment, and our end of the socket pair to it.

Its standard input is a pipe from this process: when this process ends, in any way, the pipe ends and so does the
worker, also while its event loop is blocked. It has a process group of its own, so that what the environment
started in it ends with it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.envs import EnvConfig
from orchestrator.envs.workers.link import Load, encode_frame

COMMAND = (sys.executable, "-m", "orchestrator.envs.workers")
"""The worker's program; the file descriptor of its socket follows."""
END_S = 5.0
"""Seconds that a worker gets to end by itself when its work is over."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker must know about the model that its environment is played with."""

    folder: Path | None
    """Where its tokenizer is, if there is one."""
    is_chat: bool = False
    """Whether it takes messages, and not tokens."""


class WorkerProcess:
    """Started at once; the first message it gets is `Load`. `end` must be called."""

    def __init__(self, config: EnvConfig, model: WorkerModel, command: Sequence[str] = COMMAND) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.end_of_link = ours
        # The message is far smaller than the socket's buffer: this does not wait.
        load = Load(
            env=config.model_copy(update={"num_workers": 0}).model_dump_json().encode(),
            model_path=None if model.folder is None else str(model.folder.resolve()),
            is_chat=model.is_chat,
            search_path=tuple(sys.path),
        )
        ours.sendall(encode_frame(load))

    @property
    def pid(self) -> int:
        """Process id; also that of its group."""
        return self._process.pid

    def kill(self) -> None:
        """End it and what it started, at once. It is not reaped: `end` does that."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_s: float = END_S) -> str:
        """Let it end, kill what is left after `grace_s`, reap it; how it ended. Blocks. Idempotent."""
        if self._process.returncode is None:
            self.end_of_link.close()  # its work is over; the pipe stays, or it would not have the time to end well
            deadline = time.monotonic() + grace_s
            while not self._has_ended() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            self.kill()  # also after its own end: its id is taken until it is reaped, so the group is still its own
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        return _in_words(self._process.returncode)

    def _has_ended(self) -> bool:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
