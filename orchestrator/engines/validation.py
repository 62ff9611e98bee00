"""`check_reply`: refuses replies of engines that must not be trained on."""

import numpy as np

from chat.branch import Floats
from orchestrator.engines.protocol import EngineError, InvalidResponse
from transport.errors import CodecError
from transport.wire.generation import GenerateReply, GenerateRequest, ScoreReply, ScoreRequest
from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor

LOGPROB_SLACK = 1e-5
"""A float32 log-softmax may round to just above 0."""


def check_reply(request: GenerateRequest, reply: GenerateReply, vocab_size: int) -> GenerateReply:
    """`reply`, if it can be trained on. Raises `InvalidResponse` that says why not, `EngineError` if it was aborted."""
    what = f"reply to {request.request_id}"
    if reply.request_id != request.request_id:
        raise InvalidResponse(f"{what} answers another request, {reply.request_id!r}")
    if reply.finish_reason == "abort":
        raise EngineError(f"{what}: the engine aborted the request")
    num_tokens = _check_vector(what, "token_ids", reply.token_ids, "int32")
    num_logprobs = _check_vector(what, "logprobs", reply.logprobs, "float32")
    if num_tokens != num_logprobs:
        raise InvalidResponse(f"{what} has {num_tokens} tokens but {num_logprobs} log probabilities")
    if not 0 < num_tokens <= request.max_tokens:
        raise InvalidResponse(f"{what} has {num_tokens} tokens, expected 1 to {request.max_tokens}")
    token_ids, logprobs = reply.token_ids.numpy(), reply.logprobs.numpy()
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidResponse(f"{what} has token ids outside the vocabulary of {vocab_size}")
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_SLACK:
        raise InvalidResponse(f"{what} has log probabilities that are not finite numbers <= 0")
    _check_spans(what, reply.versions, num_tokens)
    return reply


def _check_vector(what: str, name: str, tensor: EncodedTensor, dtype: str) -> int:
    try:
        tensor.check()
    except CodecError as error:
        raise InvalidResponse(f"{what}: {name}: {error}") from error
    if tensor.dtype != dtype or len(tensor.shape) != 1:
        raise InvalidResponse(f"{what}: {name} must be a {dtype} vector, got {tensor.dtype}{list(tensor.shape)}")
    return tensor.shape[0]


def _check_spans(what: str, spans: tuple[VersionSpan, ...], num_tokens: int) -> None:
    starts = [0, *(span.end for span in spans)]
    in_order = all(
        span.start == start < span.end and span.version >= 0 for span, start in zip(spans, starts, strict=False)
    )
    if not in_order or starts[-1] != num_tokens:
        raise InvalidResponse(f"{what}: version spans do not cover its {num_tokens} tokens in order: {spans}")


def checked_scores(request: ScoreRequest, reply: ScoreReply) -> Floats:
    """The log probabilities in `reply`, if they can be trained on. Raises `InvalidResponse`."""
    what = f"scores of {request.request_id}"
    if reply.request_id != request.request_id:
        raise InvalidResponse(f"{what} answer another request, {reply.request_id!r}")
    try:
        reply.logprobs.check()
    except CodecError as error:
        raise InvalidResponse(f"{what}: {error}") from error
    num_tokens = request.token_ids.shape[0]
    if not reply.logprobs.is_vector("float32", num_tokens):
        got = f"{reply.logprobs.dtype}{list(reply.logprobs.shape)}"
        raise InvalidResponse(f"{what} must be float32[{num_tokens}], got {got}")
    logprobs: Floats = reply.logprobs.numpy()
    if not np.isfinite(logprobs).all() or logprobs.max() > LOGPROB_SLACK:
        raise InvalidResponse(f"{what} are not finite numbers <= 0")
    return logprobs
