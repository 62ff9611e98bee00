"""What a client may ask, and the reason it is told when it may not."""

import math

import numpy as np
import pytest

from inference.api.engine import EngineLimits
from inference.api.generation import Completion
from inference.api.requests import GENERATE, decode_body, job_of, reply_of
from inference.errors import BadRequest
from transport.wire.codec import encode
from transport.wire.generation import GenerateRequest
from transport.wire.sample import VersionSpan
from transport.wire.tensor import EncodedTensor

LIMITS = EngineLimits(vocab_size=50, max_model_len=16, max_batch_size=4, max_waiting=4)


def request(tokens: object = (1, 2, 3), dtype: str = "int32", **fields: object) -> GenerateRequest:
    ids = EncodedTensor.of(np.array(tokens, dtype=dtype))
    return GenerateRequest(**{"request_id": "r", "token_ids": ids, "max_tokens": 5} | fields)  # type: ignore[arg-type]


def test_request_becomes_a_job() -> None:
    asked = request(temperature=0.5, seed=7, stop_token_ids=(4, 5))
    job = job_of(decode_body(GENERATE, encode(asked)), LIMITS)
    assert job.prompt.tolist() == [1, 2, 3]
    assert (job.max_tokens, job.temperature, job.top_p, job.seed) == (5, 0.5, 1.0, 7)
    assert job.stop_token_ids == {4, 5}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(()), "empty"),
        (request(range(16)), "16 tokens.*max_model_len = 16"),
        (request((1, 50)), "token id 50 at position 1"),
        (request((1, -1)), "token id -1 at position 1"),
        (request((1, 2), "int64"), "int32 vector, got int64"),
        (request(((1, 2), (3, 4))), "int32 vector"),
        (request(max_tokens=0), "max_tokens"),
        (request(temperature=-0.1), "temperature"),
        (request(temperature=0.009), "temperature must be 0 or a number >= 0.01"),
        (request(temperature=math.nan), "temperature"),
        (request(temperature=math.inf), "temperature"),
        (request(stop_token_ids=(50,)), "stop token id 50"),
        (request(adapter="lora-1"), "adapter 'lora-1'"),
        (request(token_ids=EncodedTensor("int32", (3,), memoryview(b"1234"))), "needs 12 bytes, got 4"),
    ],
)
def test_bad_request_is_told_what_is_wrong(asked: GenerateRequest, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        job_of(asked, LIMITS)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", encode(request())[:-1], b"\x91" * 5000])
def test_bytes_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not a valid GenerateRequest"):
        decode_body(GENERATE, body)


def test_reply_carries_tokens_logprobs_and_spans() -> None:
    completion = Completion(
        token_ids=np.array([3, 4], dtype=np.int32),
        logprobs=np.array([-0.5, -1.5], dtype=np.float32),
        finish_reason="stop",
        versions=(VersionSpan(2, 0, 2),),
    )
    reply = reply_of(request(), completion)
    assert reply.token_ids.numpy().tolist() == [3, 4]
    assert reply.logprobs.numpy().tolist() == [-0.5, -1.5]
    assert (reply.request_id, reply.finish_reason, reply.versions) == ("r", "stop", (VersionSpan(2, 0, 2),))
