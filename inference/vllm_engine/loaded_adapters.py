"""`LoadedAdapters`: the adapters in vLLM, one per policy version, each under a name and a folder of its own.

A request borrows the newest and keeps it to its end, so all of its tokens are of one version; vLLM's prefix cache goes
by the adapter's name, so versions never share an entry. An adapter leaves when no request has borrowed it and two newer
ones are there; its folder stays as long, because vLLM reads it again when it has evicted what was in it.
"""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from inference.config import InferenceConfig
from inference.errors import Unavailable, WeightsNotHeld, WeightsRefused
from inference.vllm_engine.checkpoint import checkpoint_shapes
from inference.weights.adapters import check_base, fitting_pairs, write_adapter_folder
from inference.weights.publish import VerifiedWeights
from inference.weights.receiver import WeightReceiver, fetch_settings
from transport.wire.generation import ServedWeights
from transport.wire.weights import AdapterInfo, adapter_digest

# Not `__name__`: vLLM shows only loggers below its own.
logger = init_logger("vllm.tandem")

NUM_KEPT = 2
"""Newest adapters that stay, borrowed or not."""


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter that every worker holds."""

    version: int
    info: AdapterInfo
    request: LoRARequest
    num_borrowers: int = 0


class LoadedAdapters:
    """Lives in the event loop of vLLM's API server. `base` is the model that vLLM has loaded, which never changes."""

    def __init__(self, client: EngineClient, base: ServedWeights, config: InferenceConfig) -> None:
        assert config.vllm.max_lora_rank is not None, "only made for an engine that takes adapters"
        self._client = client
        self._base = base
        self._run_id = config.run.name
        self._receiver = WeightReceiver(config.run.name, fetch_settings(config.weights))
        self._model_path = config.model.path
        self._max_rank = config.vllm.max_lora_rank
        self._root = config.run.path.resolve() / "adapters"
        shutil.rmtree(self._root, ignore_errors=True)  # of an engine that was killed
        self._ids = itertools.count(1)
        self._loaded: list[LoadedAdapter] = []

    @property
    def newest(self) -> LoadedAdapter | None:
        """What new requests get; `None`: the base model."""
        return self._loaded[-1] if self._loaded else None

    @contextmanager
    def borrowed(self) -> Iterator[LoadedAdapter | None]:
        """The newest adapter, which stays loaded inside the block."""
        adapter = self.newest
        if adapter is None:
            yield None
            return
        adapter.num_borrowers += 1
        try:
            yield adapter
        finally:
            adapter.num_borrowers -= 1

    async def receive(self, location: str, version: int) -> VerifiedWeights:
        """A publish, whole and checked. Raises `WeightsRefused`."""
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._receiver.receive, location, version, given_up)
        finally:
            given_up.set()  # a caller that went away leaves no transfer behind

    async def load(self, weights: VerifiedWeights) -> ServedWeights:
        """Serve new requests with this adapter; what the workers hold. Raises `WeightsRefused`: nothing changed."""
        info, number = weights.adapter, next(self._ids)
        if info is None:
            raise WeightsRefused(
                f"version {weights.version} is a whole model: an engine with vllm.max_lora_rank takes only adapters"
            )
        folder = self._root / f"v{weights.version:08d}-{number}"
        name = f"{self._run_id}-v{weights.version}-{weights.digest[:8]}-{number}"
        adapter = LoadedAdapter(weights.version, info, LoRARequest(name, number, str(folder)))
        try:
            await asyncio.to_thread(self._write, weights, info, folder)
            served = await self.read_back(adapter)
            if served.digest != weights.digest:
                raise WeightsNotHeld(f"it holds {served.digest}, not {weights.digest}")
        except Exception as error:
            await self._discard(adapter)
            if isinstance(error, WeightsRefused):
                raise
            raise WeightsRefused(f"vLLM does not take version {weights.version}: {error}") from error
        self._loaded.append(adapter)
        await self._retire()
        return served

    async def read_back(self, adapter: LoadedAdapter) -> ServedWeights:
        """Version and digest by the tensors that all workers hold. Raises `Unavailable` if they differ."""
        await self._client.add_lora(adapter.request)  # the first time, and if vLLM has evicted it meanwhile
        info, request = adapter.info, adapter.request
        arguments = (request.lora_int_id, request.lora_path, info.alpha / info.rank)
        digests = set(await self._client.collective_rpc("tandem_adapter", args=arguments))
        if len(digests) != 1:
            raise Unavailable(f"the workers disagree on the adapter of version {adapter.version}: {sorted(digests)}")
        on_base = AdapterInfo(rank=info.rank, alpha=info.alpha, base_digest=self._base.digest)
        return ServedWeights(version=adapter.version, digest=adapter_digest(digests.pop(), on_base))

    def _write(self, weights: VerifiedWeights, info: AdapterInfo, folder: Path) -> None:
        check_base(weights, info, self._base.digest)
        if info.rank > self._max_rank:
            raise WeightsRefused(
                f"version {weights.version} is an adapter of rank {info.rank}, above vllm.max_lora_rank "
                f"({self._max_rank})"
            )
        write_adapter_folder(folder, info, fitting_pairs(weights, info, checkpoint_shapes(self._model_path)))

    async def _retire(self) -> None:
        for adapter in self._loaded[:-NUM_KEPT]:
            if adapter.num_borrowers == 0:
                self._loaded.remove(adapter)
                await self._discard(adapter)

    async def _discard(self, adapter: LoadedAdapter) -> None:
        """Out of vLLM, if it is in there, and off the disk."""
        try:
            await self._client.remove_lora(adapter.request.lora_int_id)
        except Exception as error:  # an engine that is dead says so itself, and the adapter serves no request any more
            logger.warning("the adapter of version %d stays loaded: %r", adapter.version, error)
        shutil.rmtree(adapter.request.lora_path, ignore_errors=True)
