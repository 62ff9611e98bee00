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
from transport.wire.generation import GENERATE_PATH


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

    def leave_requests(self, data: bytes, num: int) -> "queue.Queue[tuple[int, bytes]]":
        """Have `num` equal generate requests under way; their answers will be in the queue.

        With `--torch.max-batch-size 1` they are decoded one after the other.
        """
        answers: queue.Queue[tuple[int, bytes]] = queue.Queue()
        for _ in range(num):
            threading.Thread(target=lambda: answers.put(self.request(GENERATE_PATH, data)), daemon=True).start()
        until(lambda: answers.qsize() + self._num_open() >= num, 30)
        assert answers.qsize() < num, "all of them have ended"
        return answers

    def _num_open(self) -> int:
        report = json.loads(self.request("/health")[1])
        return int(report["running"]) + int(report["waiting"])


@contextmanager
def server_process(folder: Path, model: Path, *args: str) -> Iterator[ServerProcess]:
    """A server that does not outlive the test."""
    server = ServerProcess(folder, model, *args)
    try:
        yield server
    finally:
        server.kill()
