"""Token in, token out: what the orchestrator asks an engine and what the engine answers.

Bodies of `POST /inference/tandem/generate` and `/score`, msgpack-encoded. The same for every engine of ours.
"""

from typing import Literal

import msgspec

from transport.wire.sample import EncodedTensor, VersionSpan

GENERATE_PATH = "/inference/tandem/generate"
SCORE_PATH = "/inference/tandem/score"
WEIGHTS_PATH = "/inference/admin/weights"
MSGPACK = "application/msgpack"

FinishReason = Literal["stop", "length", "abort"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sample a continuation of `token_ids` (int32[T])."""

    request_id: str
    token_ids: EncodedTensor
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int | None = None
    """Same seed, same weights, same prompt: same tokens, whatever else is in the engine's batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end-of-sequence ids. The token that stopped the generation is part of the reply."""
    adapter: str | None = None
    mm_kwargs: dict[str, EncodedTensor] = {}
    """Images: `pixel_values` (float32[P, D]) and `image_grid_thw` (int64[N, 3]), as in `TrainingSample`."""
    mm_token_type_ids: EncodedTensor | None = None
    """uint8[T]: 1 where a token of the prompt stands for a part of an image. Goes with `mm_kwargs`."""


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sampled tokens (int32[n]), their log probabilities at its temperature (float32[n]) and who made them."""

    request_id: str
    token_ids: EncodedTensor
    logprobs: EncodedTensor
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Spans over the *sampled* tokens: 0 is the first sampled token."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How likely is each of `token_ids` (int32[T]), given those before it? Body of `POST /inference/tandem/score`."""

    request_id: str
    token_ids: EncodedTensor
    temperature: float = 1.0
    """Of the distribution: `log_softmax(logits / temperature)`."""


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One log probability per token (float32[T]), 0 at position 0, which nothing predicts."""

    request_id: str
    logprobs: EncodedTensor
    version: int
    """The policy version that scored all tokens."""


class ServedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """JSON body of `GET /inference/admin/weights`, and part of the reply to `POST`: what the engine says it serves."""

    version: int
    digest: str


class UpdateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a weight update on one engine, by phase."""

    transfer_s: float
    """Reading or fetching the version and checking every hash; requests are served meanwhile."""
    pause_s: float
    """Waiting until nothing is decoded."""
    apply_s: float
    """Putting it into the model and reading it back; nothing is decoded meanwhile."""


class AppliedWeights(ServedWeights, frozen=True, kw_only=True, omit_defaults=True):
    """JSON reply to `POST /inference/admin/weights`."""

    times: UpdateTimes | None = None


class ApplyWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """JSON body of `POST /inference/admin/weights`: load the publish that is there."""

    location: str = msgspec.field(name="manifest_path")
    """A manifest file, or the address of another channel (`transport/wire/weights.py`)."""
    version: int
