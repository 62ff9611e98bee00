"""A real `inference` process on a free port."""

import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.inference.contract_server import Server
from tests.support.waiting import until
from transport.generation import GENERATE_PATH, PAUSE_PATH


class ServerProcess(Server):
    """The embedded engine, with what tests of the process itself ask of it."""

    def __init__(self, folder: Path, model: Path, *args: str) -> None:
        super().__init__(folder, model, *args, engine="torch")

    def request(self, path: str, data: bytes | None = None, timeout_s: float = 30.0) -> tuple[int, bytes]:
        """Status and body of an authorised request."""
        request = urllib.request.Request(self.url + path, data=data, headers=self.admin)
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
        until(lambda: json.loads(self.request("/health")[1])["waiting"] == 1, 30)
        return answers


@contextmanager
def server_process(folder: Path, model: Path, *args: str) -> Iterator[ServerProcess]:
    """A server that does not outlive the test."""
    server = ServerProcess(folder, model, *args)
    try:
        yield server
    finally:
        server.kill()
