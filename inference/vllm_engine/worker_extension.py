"""`WorkerExtension`: what vLLM's API server can ask its workers, beside the weight-transfer calls that return nothing.

vLLM mixes it into its worker class (`--worker-extension-cls`); the prefix keeps its names apart from the worker's own.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from inference.vllm_engine.readback import check_held
from inference.weights.adapters import read_adapter_folder
from inference.weights.publish import tensors_digest

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from inference.vllm_engine.weight_engine import PublishedWeightEngine


class WorkerExtension:
    """Methods for `collective_rpc`. All of them return at once."""

    weight_transfer_engine: "PublishedWeightEngine"
    model_runner: "GPUModelRunner"

    def tandem_stage(self, location: str, version: int) -> None:
        self.weight_transfer_engine.stage(location, version)

    def tandem_staging(self) -> str | None:
        return self.weight_transfer_engine.staging()

    def tandem_served(self) -> tuple[int, str] | None:
        """Version and digest of the tensors in the model; None: those of the start."""
        return self.weight_transfer_engine.served

    def tandem_adapter(self, adapter_id: int, folder: str, scale: float) -> str:
        """Digest of the tensors of the adapter that this worker holds, which must be those in `folder`."""
        manager = self.model_runner.lora_manager._adapter_manager  # there is no public way to look at an adapter
        tensors = read_adapter_folder(Path(folder))
        check_held(manager.get_adapter(adapter_id), tensors, scale, manager.packed_modules_mapping)
        return tensors_digest(tensors.items())
