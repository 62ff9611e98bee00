"""Scoring: log probabilities of a whole sequence, for teachers. From request to job, and from scores to reply."""

import math

from inference.engine import EngineLimits
from inference.errors import BadRequest
from inference.generation import ScoreJob, Scores
from inference.requests import check_tokens, int32_vector
from transport.wire.generation import ScoreReply, ScoreRequest
from transport.wire.tensor import EncodedTensor


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
    """The wire form of scores."""
    return ScoreReply(request_id=request.request_id, logprobs=EncodedTensor.of(scores.logprobs), version=scores.version)
