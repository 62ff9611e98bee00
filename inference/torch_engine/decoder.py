"""`Decoder`: continuous batching. Sequences join and leave between decode steps; so do new weights.

```
 waiting ──admit──▶ running slots ──step──▶ one more token each ──▶ Finished
                        ▲ prefill (also after a weight swap: all running sequences, with the new weights)
```
Single-threaded and synchronous: the engine's thread owns it. Nothing here knows of HTTP, clocks or asyncio.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from inference.api.generation import ScoreJob, Scores, TopLogprobs
from inference.errors import NonFiniteLogits
from inference.torch_engine.sampling import counter_uniforms, sample
from inference.torch_engine.slot_model import SlotModel, sequence_logprobs
from inference.torch_engine.slots import EngineSequence, FinishedSequence, SlotTable
from inference.weights.adapters import AdapterBase
from inference.weights.publish import VerifiedWeights, copy_into, model_digest
from transport.wire.generation import FinishReason, ServedWeights


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
