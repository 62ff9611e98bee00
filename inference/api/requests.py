"""From what a client sent to a `Job` that the engine can run: all checks that answer 400 are here, and pure."""

import math
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from inference.api.arrays import Int32s
from inference.api.engine import EngineLimits
from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.api.images import check_placeholders, images_of
from inference.errors import BadRequest
from runtime.base.files import sees_images
from transport.errors import CodecError
from transport.wire.generation import ApplyWeights, GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.sample import EncodedTensor

MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 0.01
"""vLLM samples at this where less is asked for, and says nothing; logits divided by much less overflow."""
MAX_BODY_BYTES = 16 * 2**20
MAX_IMAGE_BODY_BYTES = 256 * 2**20
"""Ten images of a million pixels, as float32 patches of two frames."""
GENERATE = msgspec.msgpack.Decoder(GenerateRequest)
SCORE = msgspec.msgpack.Decoder(ScoreRequest)
APPLY = msgspec.json.Decoder(ApplyWeights)
_T = TypeVar("_T")


def max_body_bytes(model_path: Path) -> int:
    """How large a request to the model in this folder may be."""
    return MAX_IMAGE_BODY_BYTES if sees_images(model_path) else MAX_BODY_BYTES


def decode_body(decoder: msgspec.msgpack.Decoder[_T] | msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The request in `body`. Raises `BadRequest`."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"not a valid {decoder.type.__name__}: {error}") from error


def job_of(request: GenerateRequest, limits: EngineLimits) -> Job:
    """The job that `request` asks for. Raises `BadRequest`."""
    if request.adapter is not None:
        raise BadRequest(f"adapter {request.adapter!r} is not served: adapters are versions of the one policy here")
    job = Job(
        prompt=int32_vector(request.token_ids),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop_token_ids=frozenset(request.stop_token_ids),
        images=images_of(request, limits.images),
    )
    check_job(job, limits)
    return job


def check_job(job: Job, limits: EngineLimits) -> None:
    """Raise `BadRequest` unless the engine can run `job`. A completion is cut where the model's length ends."""
    _check_prompt(job.prompt, limits)
    if limits.images is not None:
        check_placeholders(job.prompt, job.images, limits.images)
    if job.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {job.max_tokens}")
    if not (math.isfinite(job.temperature) and (job.temperature == 0 or job.temperature >= MIN_TEMPERATURE)):
        raise BadRequest(f"temperature must be 0 or a number >= {MIN_TEMPERATURE}, got {job.temperature}")
    if not 0 < job.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {job.top_p}")
    if foreign := [token for token in job.stop_token_ids if not 0 <= token < limits.vocab_size]:
        raise BadRequest(f"stop token id {foreign[0]} is not in the vocabulary of {limits.vocab_size}")
    if not 0 <= job.num_top_logprobs <= min(MAX_TOP_LOGPROBS, limits.vocab_size):
        raise BadRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {job.num_top_logprobs}")


def reply_of(request: GenerateRequest, completion: Completion) -> GenerateReply:
    return GenerateReply(
        request_id=request.request_id,
        token_ids=EncodedTensor.of(completion.token_ids),
        logprobs=EncodedTensor.of(completion.logprobs),
        finish_reason=completion.finish_reason,
        versions=completion.versions,
    )


def int32_vector(tensor: EncodedTensor) -> Int32s:
    """The token ids on the wire. Raises `BadRequest`."""
    try:
        tensor.check()
    except CodecError as error:
        raise BadRequest(f"token_ids: {error}") from error
    if tensor.dtype != "int32" or len(tensor.shape) != 1:
        raise BadRequest(f"token_ids must be an int32 vector, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.numpy()


def _check_prompt(prompt: Int32s, limits: EngineLimits) -> None:
    if len(prompt) == 0:
        raise BadRequest("the prompt is empty: at least one token is needed to continue from")
    if len(prompt) >= limits.max_model_len:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, which leaves no room in max_model_len = {limits.max_model_len}"
        )
    check_tokens(prompt, limits)


def check_tokens(prompt: Int32s, limits: EngineLimits) -> None:
    """Raise `BadRequest`, naming the first, if an id is not in the vocabulary."""
    outside = (prompt < 0) | (prompt >= limits.vocab_size)
    if outside.any():
        position = int(np.flatnonzero(outside)[0])
        raise BadRequest(
            f"token id {int(prompt[position])} at position {position} is not in the vocabulary of {limits.vocab_size}"
        )


def score_job_of(request: ScoreRequest, limits: EngineLimits) -> ScoreJob:
    """The job that `request` asks for. Raises `BadRequest`."""
    token_ids = int32_vector(request.token_ids)
    if not 0 < len(token_ids) <= limits.max_model_len:
        raise BadRequest(f"a sequence of {len(token_ids)} tokens cannot be scored: 1 to {limits.max_model_len} can")
    check_tokens(token_ids, limits)
    if not (math.isfinite(request.temperature) and request.temperature > 0):
        raise BadRequest(f"temperature must be a positive number, got {request.temperature}")
    return ScoreJob(token_ids, request.temperature)


def score_reply_of(request: ScoreRequest, scores: Scores) -> ScoreReply:
    return ScoreReply(request_id=request.request_id, logprobs=EncodedTensor.of(scores.logprobs), version=scores.version)
