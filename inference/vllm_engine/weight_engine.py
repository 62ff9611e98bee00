"""`PublishedWeightEngine`: vLLM's weight-transfer backend `tandem`, which loads our publishes. Runs in vLLM's workers.

An update has two halves. `stage` fetches a publish and checks every hash, name and shape, in a thread, while the model
goes on decoding: whatever is wrong is found here, and nothing has changed. `update_weights` then loads all of it in
one go while decoding is paused, and reads back what the model holds.
"""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from inference.errors import WeightsRefused
from inference.vllm_engine.checkpoint import checkpoint_shapes
from inference.vllm_engine.command import config_from_environment
from inference.vllm_engine.readback import read_back
from inference.weights.publish import VerifiedWeights
from inference.weights.receiver import WeightReceiver, fetch_settings

# Not `__name__`: vLLM shows only loggers below its own.
logger = init_logger("vllm.tandem")


@dataclass
class NoInit(WeightTransferInitInfo):
    """A publish is all there is to know."""


@dataclass
class StagedVersion(WeightTransferUpdateInfo):
    """Load the publish that was staged, which must be of this version."""

    version: int


class PublishedWeightEngine(WeightTransferEngine[NoInit, StagedVersion]):
    """One per worker. `served` is None until the first update: the worker has what vLLM loaded at start."""

    init_info_cls = NoInit
    update_info_cls = StagedVersion
    supports_draft_weight_update = False

    def __init__(self, config: object, vllm_config: object, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.served: tuple[int, str] | None = None
        self._staged: VerifiedWeights | None = None
        self._refused = ""
        self._reader: threading.Thread | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._given_up = threading.Event()
        service = config_from_environment()
        self._receiver = WeightReceiver(service.run.name, fetch_settings(service.weights), device)

    def stage(self, location: str, version: int) -> None:
        """Begin to fetch and check a publish; `staging` says how it went. Returns at once: decoding goes on."""
        self._given_up.set()
        before, self._given_up = self._reader, threading.Event()
        self._reader = threading.Thread(
            target=self._receive, args=(location, version, self._given_up, before), name="stage weights", daemon=True
        )
        self._reader.start()

    def staging(self) -> str | None:
        """None while it reads, else why the publish is refused; the empty string: it is not."""
        if self._reader is not None and self._reader.is_alive():
            return None
        return self._refused if self._staged is not None or self._refused else "nothing is staged"

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load what was staged. There is no device to synchronise with where vLLM's default would do so."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StagedVersion) -> None:
        """See `update_weights`. Raises when the model does not hold the weights afterwards: the worker must end."""
        staged, self._staged = self._staged, None
        if staged is None or staged.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} is not staged")
        reload_tensors(self.model, self.model_config, staged.tensors)
        held = read_back(
            self.model, in_vllm(self.model, staged.tensors), getattr(self.model, "packed_modules_mapping", {})
        )
        self.served = (staged.version, staged.digest)
        logger.info("version %d (%s) is in the model: %s", staged.version, staged.digest[:8], held)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """vLLM's hook. Does nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """vLLM's hook. Does nothing: no weight changes before all of the publish is there."""

    def finish_weight_update(self) -> None:
        """vLLM's hook. Does nothing: `receive_weights` has done all of it."""

    def shutdown(self) -> None:
        """vLLM's hook. Does nothing: there is no connection to release."""

    def _receive(self, location: str, version: int, given_up: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # of an update that was given up: memory holds one publish at a time
        self._staged, self._refused = None, ""
        try:
            weights = self._receiver.receive(location, version, given_up)
            self._check_fits(weights)
        except WeightsRefused as error:
            self._refused = str(error)
        except Exception as error:  # no caller sees a thread's exception: the update must not wait for ever
            logger.exception("cannot load %s", location)
            self._refused = f"version {version} is not loaded: {error!r}"
        else:
            self._staged = weights

    def _check_fits(self, weights: VerifiedWeights) -> None:
        """Raise `WeightsRefused` unless names, shapes and dtypes are those of the checkpoint that vLLM serves."""
        if weights.adapter is not None:
            raise WeightsRefused(
                f"version {weights.version} is an adapter of rank {weights.adapter.rank}: this engine takes adapters "
                "when it is started with vllm.max_lora_rank"
            )
        if not self._shapes:
            self._shapes = checkpoint_shapes(Path(self.model_config.model))
        if differing := weights.tensors.keys() ^ self._shapes.keys():
            raise WeightsRefused(f"version {weights.version} is of another model: {sorted(differing)[:3]}")
        for name, tensor in weights.tensors.items():
            if (tuple(tensor.shape), tensor.dtype) != (self._shapes[name], self.model_config.dtype):
                raise WeightsRefused(
                    f"version {weights.version} is of another model: {name} is {tensor.dtype}{list(tensor.shape)}, "
                    f"the engine has {self.model_config.dtype}{list(self._shapes[name])}"
                )


def in_vllm(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` by the names of vLLM's modules, which for a vision model are others than those of the checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return tensors
    rename = replace(mapper, orig_to_new_stacked={}).map_name  # `read_back` joins what vLLM stacks
    return {renamed: tensor for name, tensor in tensors.items() if (renamed := rename(name)) is not None}


def reload_tensors(model: torch.nn.Module, model_config: object, tensors: dict[str, torch.Tensor]) -> None:
    """vLLM's layerwise reload, and what it leaves out on a CPU: a tied head keeps a packed copy of its own."""
    initialize_layerwise_reload(model)
    model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
