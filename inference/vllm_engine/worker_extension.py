"""`WorkerExtension`: what vLLM's API server can ask its workers, beside the weight-transfer calls that return nothing.

vLLM mixes it into its worker class (`--worker-extension-cls`); the prefix keeps its names apart from the worker's own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.vllm_engine.weight_engine import PublishedWeightEngine


class WorkerExtension:
    """Methods for `collective_rpc`. All of them return at once."""

    weight_transfer_engine: "PublishedWeightEngine"

    def tandem_stage(self, location: str, version: int) -> None:
        """See `PublishedWeightEngine.stage`."""
        self.weight_transfer_engine.stage(location, version)

    def tandem_staging(self) -> str | None:
        """See `PublishedWeightEngine.staging`."""
        return self.weight_transfer_engine.staging()

    def tandem_served(self) -> tuple[int, str] | None:
        """Version and digest of the tensors in the model; None: those of the start."""
        return self.weight_transfer_engine.served
