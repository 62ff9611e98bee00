"""From what a client sent to a `Job` that the engine can run: all checks that answer 400 are here, and pure."""

import math
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from inference.api.arrays import Floats, Int32s, Int64s
from inference.api.engine import EngineLimits
from inference.api.generation import Completion, Job, ScoreJob, Scores
from inference.api.images import ImageLimits, Images
from inference.errors import BadRequest
from runtime.base.files import sees_images
from transport.errors import CodecError
from transport.wire.generation import ApplyWeights, GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.sample import Array, EncodedTensor

IMAGE_FIELDS = frozenset({"pixel_values", "image_grid_thw"})
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


def images_of(request: GenerateRequest, limits: ImageLimits | None) -> Images | None:
    """The images of `request`, shapes checked. Raises `BadRequest`."""
    if not request.mm_kwargs and request.mm_token_type_ids is None:
        return None
    if limits is None:
        raise BadRequest("the model in service takes no images: Qwen2.5-VL and Qwen3-VL do")
    if request.mm_kwargs.keys() != IMAGE_FIELDS or request.mm_token_type_ids is None:
        raise BadRequest(f"images need mm_token_type_ids and mm_kwargs with exactly {', '.join(sorted(IMAGE_FIELDS))}")
    pixels = _array("pixel_values", request.mm_kwargs["pixel_values"], "float32", 2)
    grids = _array("image_grid_thw", request.mm_kwargs["image_grid_thw"], "int64", 2)
    types = _array("mm_token_type_ids", request.mm_token_type_ids, "uint8", 1)
    _check_shapes(pixels, grids, limits)
    digest = xxhash.xxh3_128(request.mm_kwargs["pixel_values"].data)
    digest.update(request.mm_kwargs["image_grid_thw"].data)
    return Images(pixels, grids, types, limits.merge_size, digest.digest())


def check_placeholders(prompt: Int32s, images: Images | None, limits: ImageLimits) -> None:
    """Raise `BadRequest` unless every placeholder in `prompt` has its patch, and every patch its placeholder."""
    foreign = [token for token in limits.media_token_ids if token != limits.image_token_id]
    if np.isin(prompt, foreign).any():
        raise BadRequest("the prompt has placeholders of media other than images, which are not served")
    is_placeholder = prompt == limits.image_token_id
    types = np.zeros(len(prompt), np.uint8) if images is None else images.token_types
    if len(types) != len(prompt) or (types != is_placeholder).any():
        raise BadRequest("mm_token_type_ids must be 1 exactly at the image tokens of the prompt")
    if images is None:
        return
    if is_placeholder[-1]:
        raise BadRequest("the prompt ends within an image: there must be a token of text after it")
    sizes = (images.grids.prod(axis=1) // limits.merge_size**2).tolist()
    if (runs := [end - start for start, end in images.runs]) != sizes:
        raise BadRequest(f"the runs of image tokens are {runs} long, the images need {sizes}")


def _array(name: str, tensor: EncodedTensor, dtype: str, dimensions: int) -> Array:
    try:
        tensor.check()
    except CodecError as error:
        raise BadRequest(f"{name}: {error}") from error
    if tensor.dtype != dtype or len(tensor.shape) != dimensions:
        raise BadRequest(f"{name} must be {dtype} of {dimensions} dimensions, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.numpy()


def _check_shapes(pixels: Floats, grids: Int64s, limits: ImageLimits) -> None:
    if grids.shape[0] == 0 or grids.shape[1] != 3:
        raise BadRequest(f"image_grid_thw must be int64[N, 3] with N > 0, got {list(grids.shape)}")
    if (grids[:, 0] != 1).any() or (grids[:, 1:] < 1).any() or (grids[:, 1:] % limits.merge_size).any():
        raise BadRequest(f"a grid must be 1 x height x width in multiples of {limits.merge_size}: {grids.tolist()}")
    # Bounded before it is multiplied: a peer chose these numbers.
    if grids.max() > len(pixels) or pixels.shape != (grids.prod(axis=1).sum(), limits.num_patch_values):
        expected = f"[patches of the grids, {limits.num_patch_values}]"
        raise BadRequest(f"pixel_values must be {expected}, got {list(pixels.shape)} for grids {grids.tolist()}")
    if not np.isfinite(pixels).all():
        raise BadRequest("pixel_values holds a NaN or an infinity")
