"""`VllmEngine`: vLLM's engine client as an `InferenceEngine`. Lives in vLLM's API server, in its event loop."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
import xxhash
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient
from vllm.inputs import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.logger import init_logger
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference.api.engine import EngineLimits, EngineStats
from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.api.images import Images
from inference.errors import NonFiniteLogits, QueueFull, Unavailable, Unsupported, WeightsRefused
from inference.vllm_engine.loaded_adapters import LoadedAdapter, LoadedAdapters
from transport.wire.generation import FinishReason, ServedWeights, UpdateTimes
from transport.wire.sample import VersionSpan

logger = init_logger("vllm.tandem")

_T = TypeVar("_T")
STAGING_POLL_S = 0.01
_SEED_MASK = 2**63 - 1
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}


class VllmEngine:
    """Implements `InferenceEngine`. `served` is what the workers said last; `read_served` asks them."""

    def __init__(
        self,
        client: EngineClient,
        limits: EngineLimits,
        *,
        start: ServedWeights,
        staging_timeout_s: float,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self.limits = limits
        self.served = start
        self.failure: Exception | None = None
        self.last_progress = time.monotonic()
        self.last_update: UpdateTimes | None = None
        self._client = client
        self._start = start
        self._staging_timeout_s = staging_timeout_s
        self._adapters = adapters
        self._keys = itertools.count()
        self._num_open = 0
        self._num_sampled = 0
        self._num_prefilled = 0
        self._updating = asyncio.Lock()
        self._swapping = False

    @property
    def is_alive(self) -> bool:
        return self.failure is None and not self._client.errored

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the requests of our own route; vLLM's `/metrics` has those of its own routes, too."""
        running = min(self._num_open, self.limits.max_batch_size)
        return EngineStats(
            running=running,
            waiting=self._num_open - running,
            swapping=self._swapping,
            decode_steps=0,
            sampled_tokens=self._num_sampled,
            prefilled_tokens=self._num_prefilled,
        )

    async def generate(self, job: Job) -> Completion:
        """vLLM's own limits apply beside ours."""
        self._check_alive()
        if self._num_open >= self.limits.max_batch_size + self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests are waiting already: try again later")
        self._num_open += 1
        try:
            with nullcontext() if self._adapters is None else self._adapters.borrowed() as adapter:
                completion = _completion_of(await self._run(job, adapter), adapter)
        except EngineDeadError as error:
            raise self._died(error) from error
        finally:
            self._num_open -= 1
        self.last_progress = time.monotonic()
        self._num_sampled += len(completion.token_ids)
        self._num_prefilled += len(job.prompt)
        return completion

    async def score(self, job: ScoreJob) -> Scores:
        """Always raises `Unsupported`: teachers are served by the embedded engine."""
        raise Unsupported("vLLM does not score given tokens at a temperature: serve teachers with --engine torch")

    async def apply_weights(self, location: str, version: int) -> ServedWeights:
        """Staged while decoding goes on; requests in flight go on with the new weights, and
        their KV cache is computed anew."""
        async with self._updating:
            self._check_alive()
            if self._adapters is not None:
                return await self._apply_adapter(self._adapters, location, version)
            started = time.monotonic()
            await self._stage(location, version)
            staged = time.monotonic()
            try:
                async with self._paused_for_update():
                    paused = time.monotonic()
                    await self._swap(version)
                    swapped = time.monotonic()
                self.served = await self.read_served()
            except Exception as error:  # the model may hold parts of both versions: nothing may be sampled from it
                raise self._died(error) from error
            self.last_update = UpdateTimes(
                transfer_s=staged - started, pause_s=paused - staged, apply_s=swapped - paused
            )
            self.last_progress = time.monotonic()
            return self.served

    async def _apply_adapter(self, adapters: LoadedAdapters, location: str, version: int) -> ServedWeights:
        """Nothing is paused: requests in flight end with the adapter they began with."""
        started = time.monotonic()
        weights = await adapters.receive(location, version)
        read = time.monotonic()
        self.served = await adapters.load(weights)
        self.last_progress = time.monotonic()
        self.last_update = UpdateTimes(transfer_s=read - started, pause_s=0.0, apply_s=self.last_progress - read)
        return self.served

    async def read_served(self) -> ServedWeights:
        """Version and digest that all workers hold, and that vLLM labels tokens with. Raises `Unavailable`."""
        self._check_alive()
        if self._adapters is not None and self._adapters.newest is not None:
            return await self._adapters.read_back(self._adapters.newest)
        rows: Sequence[tuple[int, str] | None] = await self._ask("tandem_served")
        answers = [self._start if row is None else ServedWeights(version=row[0], digest=row[1]) for row in rows]
        label = await self._client.get_weight_version()
        if any(answer != answers[0] for answer in answers) or label != str(answers[0].version):
            raise Unavailable(f"the workers disagree: they hold {answers}, tokens are labelled {label}")
        return answers[0]

    async def _run(self, job: Job, adapter: LoadedAdapter | None) -> CompletionOutput:
        params = SamplingParams(
            max_tokens=min(job.max_tokens, self.limits.max_model_len - len(job.prompt)),
            temperature=job.temperature,
            top_p=job.top_p,
            seed=None if job.seed is None else job.seed & _SEED_MASK,
            stop_token_ids=sorted(job.stop_token_ids),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last = None
        prompt = engine_input(job)
        key, lora = f"tandem-{next(self._keys)}", None if adapter is None else adapter.request
        async for output in self._client.generate(prompt, params, key, lora_request=lora):
            last = output
        if last is None or not last.outputs:
            raise Unavailable("vLLM ended the request without an output")
        return last.outputs[0]

    async def _stage(self, location: str, version: int) -> None:
        """Have every worker fetch and check the publish. Raises `WeightsRefused`."""
        await self._ask("tandem_stage", str(location), version)
        deadline = time.monotonic() + self._staging_timeout_s
        reasons: Sequence[str | None] = [None]
        while None in (reasons := await self._ask("tandem_staging")):
            if time.monotonic() > deadline:
                raise WeightsRefused(f"version {version} was not read within {self._staging_timeout_s:g} s")
            await asyncio.sleep(STAGING_POLL_S)
        if any(reasons):
            raise WeightsRefused(next(reason for reason in reasons if reason))

    @asynccontextmanager
    async def _paused_for_update(self) -> AsyncIterator[None]:
        """No decode step runs in the block; the caches are empty. Requests in flight go on after it."""
        self._swapping = True
        try:
            await self._client.pause_generation(mode="keep", clear_cache=True)
            yield
            await self._client.resume_generation()
        finally:
            self._swapping = False

    async def _swap(self, version: int) -> None:
        await self._client.start_weight_update()
        await self._client.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await self._client.finish_weight_update(weight_version=str(version))

    async def _ask(self, method: str, *args: object) -> "Sequence[_T]":
        answers: Sequence[_T] = await self._client.collective_rpc(method, args=args)
        return answers

    def _check_alive(self) -> None:
        if self.failure is None and self._client.errored:
            self._died(self._client.dead_error)
        if self.failure is not None:
            raise Unavailable(f"the engine died: {self.failure!r}")

    def _died(self, error: BaseException) -> Unavailable:
        self.failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        return Unavailable(f"the engine died: {error!r}")


def _completion_of(output: CompletionOutput, adapter: LoadedAdapter | None) -> Completion:
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    pairs = zip(output.token_ids, output.logprobs or (), strict=True)
    logprobs = np.asarray([entry[token].logprob for token, entry in pairs], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogits("a sampled token has no finite log probability: the weights are broken")
    # vLLM labels tokens with the version of the base model; a request has one adapter from its first to its last token.
    whole = () if adapter is None else (VersionSpan(adapter.version, 0, len(token_ids)),)
    labels = tuple(VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions or ())
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=_FINISH_REASONS.get(output.finish_reason, "abort"),
        versions=whole or labels,
    )


MODALITY = "image"


def engine_input(job: Job) -> TokensInput | MultiModalInput:
    """What `EngineClient.generate` takes for `job`, which was checked.

    Images come cut into patches and their placeholders expanded, so vLLM's own image processor is passed by. It
    must not rescale and normalise them once more on the device either (`--no-mm-device-do-normalize`, see
    `command.py`).
    """
    tokens = job.prompt.tolist()
    if job.images is None:
        return tokens_input(tokens)
    items = _items(job.images)
    return mm_input(tokens, {MODALITY: items}, {MODALITY: _hashes(job.images)}, {MODALITY: _placeholders(job.images)})


def _items(images: Images) -> list[MultiModalKwargsItem]:
    """One per image, with the names that the model's forward takes."""
    grids = torch.tensor(images.grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(MODALITY, grids.prod(dim=1)),
        "image_grid_thw": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),  # positions are computed there
    }
    values = {"pixel_values": torch.tensor(images.pixel_values), "image_grid_thw": grids}
    items: list[MultiModalKwargsItem] = MultiModalKwargsItems.from_hf_inputs(values, fields)[MODALITY]
    return items


def _hashes(images: Images) -> list[str]:
    """By which vLLM knows an image again, in its caches of prefixes and of what the vision tower made."""
    hashes = []
    for grid, patches in zip(images.grids, images.patches, strict=True):
        digest = xxhash.xxh3_128(grid.data)
        digest.update(patches.data)
        hashes.append(digest.hexdigest())
    return hashes


def _placeholders(images: Images) -> list[PlaceholderRange]:
    return [PlaceholderRange(offset=start, length=end - start) for start, end in images.runs]
