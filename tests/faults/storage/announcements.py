"""`Announcements`: a trainer, as far as the policy sees it: it publishes real weights and says so."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trainer.ranks import Ranks
from trainer.weights.files import FilePublisher
from transport.changes import Changes
from transport.outbox.progress import PublishedWeights


class Announcements:
    """What `WeightUpdates` reads of a `BatchServer`. Each version is the model plus a little noise."""

    def __init__(self, root: Path, run_id: str, model_path: Path, keep: int = 2) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.weights: PublishedWeights | None = None
        self._changes = Changes()
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
        self._changes.notify()

    async def wait_weights(self, seen: PublishedWeights | None, timeout_s: float | None = None) -> PublishedWeights:
        """See `BatchServer`."""
        await self._changes.wait_for(lambda: self.weights not in (None, seen))
        assert self.weights is not None
        return self.weights
