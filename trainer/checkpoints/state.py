"""What a checkpoint holds, as one flat dict of tensors that are saved from, and loaded into, the live objects.

Keys: `model.<weight>`, `optimizer.<parameter>.<state>`, the same two for a critic (`critic.`, `critic_optimizer.`), and
`rng.<rank>.<device>`. torch's DCP shards all but the last as the ranks of the saving run do, and reads them back for
any other number of ranks. Its safetensors storage writes files of tensors and JSON: reading one runs no code.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from runtime.errors import StorageError, UserError
from trainer.critic.critic import CriticLearner
from trainer.optimizer import named_moments
from trainer.ranks import Ranks
from trainer.weights.local_ranges import named_weights

MODEL_PREFIX = "model."
CRITIC_PREFIX = "critic."
RANDOM_PREFIX = "rng."
FILE_BYTES = 1 << 30
"""A rank's tensors go into files of about this size: torch makes up each file in memory before it writes it."""


@dataclass(frozen=True)
class TrainState:
    """Everything that an optimizer step changes and a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    critic: CriticLearner | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, not copied."""
        tensors = _prefixed(MODEL_PREFIX, named_weights(self.model))
        tensors |= _prefixed("optimizer.", named_moments(self.model, self.optimizer))
        if self.critic is not None:
            tensors |= _prefixed(CRITIC_PREFIX, named_weights(self.critic.critic))
            tensors |= _prefixed("critic_optimizer.", named_moments(self.critic.critic, self.critic.optimizer))
        return tensors


def save_tensors(folder: Path, state: TrainState, ranks: Ranks, *, background: bool = False) -> Callable[[], None]:
    """Write all tensors, synced to the disk; in the `background`, from copies in host memory. What is returned waits
    until they are written; it may be called in another thread, which then has `ranks` (with a group of its own) to
    itself. Collective; on any failure this, or what is returned, raises `StorageError` on every rank."""
    tensors = {key: tensor.contiguous() for key, tensor in state.tensors().items()} | _random_states(ranks)
    writer = HuggingFaceStorageWriter(str(folder), file_numbers(tensors, ranks.world_size), save_distributed=True)
    save = state_dict_saver.async_save if background else state_dict_saver.save
    with _dcp(ranks.is_distributed):
        writing = save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=not ranks.is_distributed)

    def wait() -> None:
        if background:
            assert isinstance(writing, Future), "the writer stages its copies itself"
            with _dcp(ranks.is_distributed):
                writing.result()

    return wait


def load_tensors(folder: Path, state: TrainState, ranks: Ranks) -> None:
    """Load in place what `save_tensors` wrote, with any number of ranks. A rank that is new keeps its random state."""
    reader = HuggingFaceStorageReader(str(folder))
    saved = _read_metadata(reader)
    if state.critic is not None and not any(key.startswith(CRITIC_PREFIX) for key in saved):
        raise UserError(f"{folder} was written without a critic, and the config has one: start another run")
    tensors = state.tensors()
    if unlike := [key for key, tensor in tensors.items() if not _is_like(saved.get(key), tensor)]:
        raise UserError(
            f"{folder} has no {unlike[0]} of shape {list(tensors[unlike[0]].shape)}: it was written with another "
            "model, optimizer.type or critic; set them as the run began, or choose another --run.name"
        )
    random_states = {key: value for key, value in _random_states(ranks).items() if key in saved}
    with _dcp(ranks.is_distributed):
        state_dict_loader.load(
            tensors | random_states,
            storage_reader=reader,
            process_group=ranks.group,
            no_dist=not ranks.is_distributed,
        )
    for key, value in random_states.items():
        torch.set_rng_state(value) if key.endswith(".cpu") else torch.cuda.set_rng_state(value, ranks.device)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Only the model's weights, whole, by their names, on the CPU."""
    reader = HuggingFaceStorageReader(str(folder))
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in _read_metadata(reader).items()
        if key.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    with _dcp(is_distributed=False):
        state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in state.items()}


def file_numbers(tensors: Mapping[str, Tensor], world_size: int) -> dict[str, int]:
    """Number of the file, from 1, in which each rank writes its part of each tensor. The first rank's answer counts, so
    it must know the random states of all ranks, too."""
    numbers = {f"{RANDOM_PREFIX}{rank}.{device}": 1 for rank in range(world_size) for device in ("cpu", "cuda")}
    num_bytes = 0
    for key, tensor in tensors.items():
        numbers.setdefault(key, 1 + num_bytes // FILE_BYTES)
        num_bytes += (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
    return numbers


def _read_metadata(reader: HuggingFaceStorageReader) -> Mapping[str, object]:
    """What the files hold, by key. `StorageError` if they cannot be read."""
    try:
        return reader.read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{reader.checkpoint_id} cannot be read: {error}") from error


@contextmanager
def _dcp(is_distributed: bool) -> Iterator[None]:
    """Calls of DCP: its errors, which are not `Exception`s, become a `StorageError`; without a process group it warns
    that it assumes a single process, which is what we ask it for."""
    with nullcontext() if is_distributed else warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
            raise StorageError(causes) from error


def _is_like(saved: object, tensor: Tensor) -> bool:
    return isinstance(saved, TensorStorageMetadata) and saved.size == tensor.shape


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _random_states(ranks: Ranks) -> dict[str, Tensor]:
    states = {f"{RANDOM_PREFIX}{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"{RANDOM_PREFIX}{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states
