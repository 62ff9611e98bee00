"""`Announcements`: a trainer, as far as the policy sees it: it publishes real weights and says so."""

import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trainer.ranks import Ranks
from trainer.weights.files import FilePublisher
from transport.outbox.progress import PublishedWeights


class Announcements:
    """What `Policy` reads of a `BatchServer`. Each version is the model plus a little noise."""

    def __init__(self, root: Path, run_id: str, model_path: Path, keep: int = 2) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.weights: PublishedWeights | None = None
        self._changed = asyncio.Event()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._publisher = FilePublisher(root, run_id, keep, Ranks(0, 1, torch.device("cpu")))

    def publish(self, version: int) -> PublishedWeights:
        """Write `version` to the disk; nobody hears of it. The same version has the same weights every time."""
        with torch.no_grad():
            self._model.model.embed_tokens.weight[0].fill_(1e-3 * version)
        return self._publisher.publish(self._model, version)

    def announce(self, weights: PublishedWeights) -> None:
        """The newest version is this one."""
        self.weights = weights
        self._changed.set()

    async def wait_weights(self, seen: PublishedWeights | None, timeout_s: float | None = None) -> PublishedWeights:
        """See `BatchServer`."""
        while self.weights is None or self.weights == seen:
            self._changed.clear()
            await self._changed.wait()
        return self.weights
