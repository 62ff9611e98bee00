"""`Decoder`: continuous batching. Sequences join and leave between decode steps; so do new weights.

```
 waiting ──admit──▶ running slots ──step──▶ one more token each ──▶ Finished
                        ▲ prefill (also after a weight swap: all running sequences, with the new weights)
```
Single-threaded and synchronous: the engine's thread owns it. Nothing here knows of HTTP, clocks or asyncio.

`sample` turns logits into tokens for a whole batch: temperature, top-p, an inverse-CDF draw. Its shapes: B sequences,
V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.api.arrays import Float64s, Floats, UInt64s
from inference.api.generation import ScoreJob, Scores, TopLogprobs
from inference.errors import NonFiniteLogits
from inference.torch_engine.slots import EngineSequence, FinishedSequence, SlotModel, SlotTable, sequence_logprobs
from inference.weights.adapters import AdapterBase
from inference.weights.publish import VerifiedWeights, copy_into, model_digest
from transport.wire.generation import FinishReason, ServedWeights
from transport.wire.sample import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48
"""Resolution of a draw. Below 53, so that `u * total < total` holds in float64 for every `u < 1`."""


class Sampled(NamedTuple):
    """The tokens of one decode step and their log probabilities."""

    tokens: Tensor
    """int64[B]."""
    logprobs: Tensor
    """float32[B] of the sampled tokens, at the row's temperature, before top-p truncation."""
    all_logprobs: Tensor
    """float32[B, V], the distribution `logprobs` was read from."""


def sample(logits: Tensor, temperature: Floats, top_p: Floats, uniform: Float64s) -> Sampled:
    """Row `i` is greedy where `temperature[i]` is 0, else drawn with `uniform[i]` in [0, 1) by inverse CDF.

    What steers the rows is on the host: which work they need is known without waiting for the device. A row with a NaN
    gets some valid token and a non-finite log probability: the caller decides what that means.
    """
    all_logprobs = torch.log_softmax(_tempered(logits.float(), temperature), dim=-1)
    tokens = _draw(_truncate(all_logprobs.double().exp(), top_p), _like(uniform, logits))
    greedy = temperature == 0
    if greedy.any():
        tokens = torch.where(_like(greedy, logits), all_logprobs.argmax(dim=-1), tokens)
    return Sampled(tokens, all_logprobs.gather(1, tokens[:, None])[:, 0], all_logprobs)


def _tempered(logits: Tensor, temperature: Floats) -> Tensor:
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    return logits if (divisor == 1).all() else logits / _like(divisor, logits)[:, None]


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the draw; tokens of probability 0 are never first."""
    cdf = probs.cumsum(dim=-1)
    tokens = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=probs.shape[1] - 1)


def _truncate(probs: Tensor, top_p: Floats) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches `top_p`. Rows with `top_p` 1 stay whole."""
    narrowed = np.flatnonzero(top_p < 1)
    if len(narrowed) == 0:
        return probs
    rows = _like(narrowed, probs)
    ordered, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(mass_before < _like(top_p[narrowed], probs)[:, None], ordered, 0.0)
    return probs.index_copy(0, rows, torch.zeros_like(kept).scatter_(1, order, kept))


def _like(array: Array, tensor: Tensor) -> Tensor:
    """`array` on the device of `tensor`."""
    return torch.from_numpy(array).to(tensor.device)


def counter_uniforms(seeds: UInt64s, indices: UInt64s) -> Float64s:
    """Draw number `indices[i]` of the stream `seeds[i]`, in [0, 1)."""
    bits = _mix(_mix(seeds + _GOLDEN) + indices * _GOLDEN)
    return (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def stream_seed(base: int, number: int) -> int:
    """Seed of the `number`-th request that brought none, for a server with seed `base`."""
    mixed = _mix(np.array([base], dtype=np.uint64) + _GOLDEN) ^ np.array([number], dtype=np.uint64)
    return int(_mix(mixed)[0])


def _mix(x: UInt64s) -> UInt64s:
    """The SplitMix64 finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Decoder:
    """Runs a `SlotModel` of which it is the only user. `served` says what the model's tensors hold now."""

    def __init__(self, model: SlotModel, num_slots: int, max_length: int) -> None:
        self._model = model
        self._base = AdapterBase(model.hf)
        self._table = SlotTable(num_slots, max_length)
        self._waiting: OrderedDict[int, EngineSequence] = OrderedDict()
        self.served = ServedWeights(version=0, digest=model_digest(model.hf))
        self.num_steps = 0
        self.num_sampled_tokens = 0
        self.num_prefilled_tokens = 0

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting) or self.num_running > 0

    def loadable(self, weights: VerifiedWeights) -> VerifiedWeights:
        """What `swap` takes for a publish: an adapter comes back merged. Raises `WeightsRefused` if nothing fits.

        May be called from any thread, but not while another call, or the swap of its result, is under way.
        """
        return self._base.loadable(weights)

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence; it joins at the next step with a free slot, in the order of arrival."""
        self._waiting[sequence.key] = sequence

    @torch.inference_mode()
    def abort(self, key: int) -> None:
        """Forget a sequence, wherever it is. Unknown keys have finished already."""
        if self._waiting.pop(key, None) is None:
            self._free([slot for slot, running in enumerate(self._table.sequences) if running.key == key])

    @torch.inference_mode()
    def step(self) -> list[FinishedSequence]:
        """Admit what fits, sample one token for every running sequence, and let the finished ones go."""
        self._admit()
        if self.num_running == 0:
            return []
        logits = self._next_logits()
        tokens = self._sample(logits)
        finished = self._collect(tokens)
        self._free(list(finished))
        return list(finished.values())

    @torch.inference_mode()
    def swap(self, weights: VerifiedWeights) -> ServedWeights:
        """Serve `weights`, which `loadable` gave, from the next token on. Running sequences keep their tokens; their
        keys and values are computed again, so that all later log probabilities are exactly those of the new version."""
        copy_into(self._model.hf, weights)
        digest, expected = model_digest(self._model.hf), weights.merged_digest or weights.digest
        assert digest == expected, f"after the copy the model has digest {digest}, not {expected}"
        self._base.loaded(weights)
        self.served = ServedWeights(version=weights.version, digest=weights.digest)
        for slot, sequence in enumerate(self._table.sequences):
            sequence.switches.append((weights.version, self._table.num_sampled(slot)))
        self._prefill(range(self.num_running))
        return self.served

    @torch.inference_mode()
    def score(self, job: ScoreJob) -> Scores | NonFiniteLogits:
        """Log probabilities of all tokens of `job` under the weights in service; running sequences are not touched."""
        logprobs = sequence_logprobs(self._model.hf, job.token_ids, job.temperature, self._model.cache.max_length)
        return Scores(logprobs, self.served.version) if np.isfinite(logprobs).all() else self._broken()

    def _admit(self) -> None:
        joining = []
        while self._waiting and self._table.num_free:
            _, sequence = self._waiting.popitem(last=False)
            sequence.switches.append((self.served.version, 0))
            joining.append(self._table.add(sequence))
        self._prefill(joining)

    def _prefill(self, slots: Iterable[int]) -> None:
        """Fill the cache up to, not including, the newest token of each slot."""
        tokens = {slot: self._table.tokens[slot, : self._table.lengths[slot] - 1] for slot in slots}
        jobs = {slot: self._table.sequences[slot].job for slot in tokens}
        self._model.prefill(tokens, {slot: job.images for slot, job in jobs.items() if job.images is not None})
        self.num_prefilled_tokens += sum(map(len, tokens.values()))

    def _next_logits(self) -> Tensor:
        last = self._table.lengths[: self.num_running] - 1
        newest = self._table.tokens[np.arange(self.num_running), last]
        return self._model.decode(newest, last, self._table.rotary_offsets[: self.num_running])

    def _sample(self, logits: Tensor) -> list[int]:
        """Append one token to every running sequence; returns the tokens."""
        table, num = self._table, self.num_running
        num_sampled = (table.lengths[:num] - table.prompt_lengths[:num]).astype(np.uint64)
        sampled = sample(
            logits,
            table.temperatures[:num],
            table.top_ps[:num],
            counter_uniforms(table.seeds[:num], num_sampled),
        )
        self._keep_top_logprobs(sampled.all_logprobs)
        tokens = sampled.tokens.to("cpu", torch.int32).numpy()
        table.append(tokens, sampled.logprobs.cpu().numpy())
        self.num_steps += 1
        self.num_sampled_tokens += num
        as_list: list[int] = tokens.tolist()
        return as_list

    def _keep_top_logprobs(self, all_logprobs: Tensor) -> None:
        rows = [slot for slot, sequence in enumerate(self._table.sequences) if sequence.job.num_top_logprobs]
        if not rows:
            return
        most = max(self._table.sequences[slot].job.num_top_logprobs for slot in rows)
        top = all_logprobs[rows].topk(most, dim=-1)
        values, indices = top.values.cpu().numpy(), top.indices.to("cpu", torch.int32).numpy()
        for row, slot in enumerate(rows):
            sequence = self._table.sequences[slot]
            kept = slice(sequence.job.num_top_logprobs)
            sequence.top_logprobs.append(TopLogprobs(indices[row, kept], values[row, kept]))

    def _collect(self, tokens: list[int]) -> dict[int, FinishedSequence]:
        """The sequences that end with the token they just got, by slot."""
        table = self._table
        rows, ends = np.arange(self.num_running), table.lengths[: self.num_running]
        finite = np.isfinite(table.logprobs[rows, ends - 1]).tolist()
        lengths: list[int] = ends.tolist()
        finished = {}
        for slot, sequence in enumerate(table.sequences):
            if not finite[slot]:
                finished[slot] = FinishedSequence(sequence.key, self._broken())
            elif reason := self._finish_reason(slot, tokens[slot], lengths[slot]):
                finished[slot] = FinishedSequence(sequence.key, table.completion(slot, reason))
        return finished

    def _finish_reason(self, slot: int, token: int, length: int) -> FinishReason | None:
        sequence = self._table.sequences[slot]
        if token in sequence.stop_ids:
            return "stop"
        watch = sequence.job.should_stop
        if watch is not None and watch(self._table.sampled_tokens(slot)):
            return "stop"
        return "length" if length >= sequence.limit else None

    def _broken(self) -> NonFiniteLogits:
        return NonFiniteLogits(f"weights of version {self.served.version} give no finite probabilities for this prompt")

    def _free(self, slots: list[int]) -> None:
        if slots:
            longest = int(self._table.lengths[: self.num_running].max())
            moves = self._table.remove(slots)
            self._model.move(moves.sources, moves.targets, longest)
