"""A real server of either engine, and a model that both can serve.

`TANDEM_TEST_ENGINE=vllm` (as `make test-vllm` sets it) runs the contract suite against vLLM; the default is `torch`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.support import models
from tests.support.process import Service

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


class Server(Service):
    """`inference --engine ENGINE`, with its run directory in `folder`. The embedded engine starts warm, or `cold`."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *args: str,
        token: bool = True,
        engine: str = ENGINE,
        cold: bool = False,
    ) -> None:
        self.token_file = folder / "admin.token"
        size = (f"--{engine}.max-model-len", str(MAX_MODEL_LEN), f"--{engine}.max-batch-size", str(MAX_BATCH_SIZE))
        secret = ("--admin-token-file", str(self.token_file)) if token else ()
        words = ("inference", "--engine", engine, "--model.path", str(model), "--server.port", "0", *size, *secret)
        warm = engine == "torch" and not cold
        super().__init__("inference", folder / "runs" / "default", *words, *args, cwd=folder, warm=warm)

    @property
    def url(self) -> str:
        """Base URL, once the server has announced itself."""
        self.until(lambda: "inference" in self.run_dir.read_services(), START_S)
        return self.run_dir.read_services()["inference"].addresses["http"]

    @property
    def admin(self) -> dict[str, str]:
        """Headers of an authorised request."""
        return {"Authorization": f"Bearer {self.token_file.read_text()}"}


@contextmanager
def running_server(folder: Path, model: Path, *args: str, **options: Any) -> Iterator[Server]:
    """A server that does not outlive the block."""
    server = Server(folder, model, *args, **options)
    try:
        yield server
    finally:
        server.stop()
