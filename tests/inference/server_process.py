"""A real `inference` process on a free port."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transport.generation import GENERATE_PATH, PAUSE_PATH

START_S = 90.0


class ServerProcess:
    """`python -m inference` with its run directory in `folder`."""

    def __init__(self, folder: Path, model: Path, *args: str) -> None:
        self.run_dir = folder / "runs" / "default"
        self.token_file = folder / "admin.token"
        fixed = ("--model.path", str(model), "--server.port", "0", "--torch.max-model-len", "256")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inference", *fixed, "--admin-token-file", str(self.token_file), *args],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def url(self) -> str:
        """Base URL, read from the announcement that the server makes when it is ready."""
        path = self.run_dir / "services" / "inference.json"
        deadline = time.monotonic() + START_S
        while not path.exists():
            assert self.process.poll() is None, f"the server ended: {self.process.communicate()[1]}"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        url: str = json.loads(path.read_bytes())["addresses"]["http"]
        return url

    def request(self, path: str, data: bytes | None = None, timeout_s: float = 30.0) -> tuple[int, bytes]:
        """Status and body of an authorised request."""
        url = self.url + path
        headers = {"Authorization": f"Bearer {self.token_file.read_text()}"}
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def hold_request(self, data: bytes) -> "queue.Queue[tuple[int, bytes]]":
        """Pause the engine and leave a generate request with it; its answer will be in the queue."""
        answers: queue.Queue[tuple[int, bytes]] = queue.Queue()
        assert self.request(PAUSE_PATH, b"")[0] == 200
        threading.Thread(target=lambda: answers.put(self.request(GENERATE_PATH, data)), daemon=True).start()
        deadline = time.monotonic() + 30
        while json.loads(self.request("/health")[1])["waiting"] != 1:
            assert time.monotonic() < deadline, "the request did not arrive"
            time.sleep(0.02)
        return answers

    def terminate(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; exit code and stderr."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr of the ended process."""
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


@contextmanager
def server_process(folder: Path, model: Path, *args: str) -> Iterator[ServerProcess]:
    """A server that does not outlive the test."""
    server = ServerProcess(folder, model, *args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate(timeout=30)
