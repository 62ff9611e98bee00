"""A real server of either engine, started by the command a user types, and a model that both can serve.

`TANDEM_TEST_ENGINE=vllm` (as `make test-vllm` sets it) runs the contract suite against vLLM; the default is `torch`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from tests.support import models

ENGINE = os.environ.get("TANDEM_TEST_ENGINE", "torch")
MAX_MODEL_LEN = 256
MAX_BATCH_SIZE = 64
START_S = 240.0


def make_model(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    """Random and not flat. Heads of 32, since vLLM's CPU attention has none of 16; no end of sequence, so that
    requests have the length they ask for."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    return models.make_model(seed, tied=tied, **heads, bos_token_id=None, eos_token_id=None)


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """A Hugging Face folder whose tokenizer has no end of sequence, either."""
    model.save_pretrained(folder)
    tokenizer = models.make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


class Server:
    """`inference --engine ENGINE`, with its run directory in `folder`."""

    def __init__(self, folder: Path, model: Path, *args: str, token: bool = True, engine: str = ENGINE) -> None:
        self.run_dir = folder / "runs" / "default"
        self.token_file = folder / "admin.token"
        size = (f"--{engine}.max-model-len", str(MAX_MODEL_LEN), f"--{engine}.max-batch-size", str(MAX_BATCH_SIZE))
        secret = ("--admin-token-file", str(self.token_file)) if token else ()
        command = ("--engine", engine, "--model.path", str(model), "--server.port", "0", *size, *secret, *args)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inference", *command],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def url(self) -> str:
        """Base URL, once the server has announced itself."""
        path = self.run_dir / "services" / "inference.json"
        deadline = time.monotonic() + START_S
        while not path.exists():
            assert self.process.poll() is None, f"the server ended: {self.process.communicate()[1]}"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        url: str = json.loads(path.read_bytes())["addresses"]["http"]
        return url

    @property
    def admin(self) -> dict[str, str]:
        """Headers of an authorised request."""
        return {"Authorization": f"Bearer {self.token_file.read_text()}"}

    def terminate(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; exit code and stderr."""
        self.process.send_signal(number)
        errors = self.process.communicate(timeout=90)[1]
        return self.process.returncode, errors


@contextmanager
def running_server(folder: Path, model: Path, *args: str, token: bool = True, engine: str = ENGINE) -> Iterator[Server]:
    """A server that does not outlive the block."""
    server = Server(folder, model, *args, token=token, engine=engine)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.terminate()
        if server.process.stderr is not None:
            server.process.stderr.close()
