from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.engines.protocol import EngineError, InvalidResponse, check_reply
from tests.chat.replies import make_reply
from transport.wire.generation import GenerateReply, GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

VOCAB_SIZE = 50
REQUEST = GenerateRequest(request_id="r", token_ids=EncodedTensor.of(np.zeros(3, np.int32)), max_tokens=4)
replace = msgspec.structs.replace


def floats(*values: float) -> EncodedTensor:
    return EncodedTensor.of(np.array(values, dtype=np.float32))


def ints(*values: int) -> EncodedTensor:
    return EncodedTensor.of(np.array(values, dtype=np.int32))


BROKEN: dict[str, Callable[[GenerateReply], GenerateReply]] = {
    "another request": lambda reply: replace(reply, request_id="other"),
    "but 2 log probabilities": lambda reply: replace(reply, logprobs=floats(-1, -1)),
    "0 tokens": lambda reply: replace(reply, token_ids=ints(), logprobs=floats(), versions=()),
    "5 tokens": lambda reply: make_reply([1] * 5),
    "outside the vocabulary of 50": lambda reply: replace(reply, token_ids=ints(1, 50, 2)),
    "outside the vocabulary": lambda reply: replace(reply, token_ids=ints(1, -1, 2)),
    "not finite": lambda reply: replace(reply, logprobs=floats(-1, float("nan"), -1)),
    "numbers <= 0": lambda reply: replace(reply, logprobs=floats(-1, 0.5, -1)),
    "finite": lambda reply: replace(reply, logprobs=floats(-1, float("-inf"), -1)),
    "must be a int32 vector": lambda reply: replace(reply, token_ids=EncodedTensor.of(np.zeros(3, np.int64))),
    "must be a float32 vector": lambda reply: replace(reply, logprobs=EncodedTensor.of(np.zeros((3, 1), np.float32))),
    "bytes": lambda reply: replace(reply, token_ids=EncodedTensor("int32", (3,), memoryview(b"1234"))),
    "spans": lambda reply: replace(reply, versions=()),
    "do not cover": lambda reply: replace(reply, versions=(VersionSpan(0, 0, 2),)),
    "in order": lambda reply: replace(reply, versions=(VersionSpan(0, 1, 3),)),
    "cover": lambda reply: replace(reply, versions=(VersionSpan(0, 0, 3), VersionSpan(1, 3, 3))),
    "version": lambda reply: replace(reply, versions=(VersionSpan(-1, 0, 3),)),
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_reply_that_breaks_the_contract_is_invalid(complaint: str) -> None:
    reply = BROKEN[complaint](make_reply([1, 2, 3]))
    with pytest.raises(InvalidResponse, match=complaint):
        check_reply(REQUEST, reply, VOCAB_SIZE)


def test_sound_reply_is_returned() -> None:
    reply = make_reply([0, 49], versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)))
    assert check_reply(REQUEST, reply, VOCAB_SIZE) is reply


def test_log_probability_that_rounds_above_zero_is_accepted() -> None:
    reply = replace(make_reply([1]), logprobs=floats(5e-7))
    assert check_reply(REQUEST, reply, VOCAB_SIZE) is reply


def test_aborted_reply_is_the_engines_failure_and_not_invalid() -> None:
    with pytest.raises(EngineError, match="aborted") as caught:
        check_reply(REQUEST, replace(make_reply([1]), finish_reason="abort"), VOCAB_SIZE)
    assert not isinstance(caught.value, InvalidResponse)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(-2, 60), max_size=6),
    logprobs=st.lists(st.floats(-5, 1, width=32) | st.sampled_from([float("nan"), float("inf")]), max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 6)), max_size=3),
)
def test_accepted_replies_are_always_trainable(ids: list[int], logprobs: list[float], spans: list) -> None:
    reply = GenerateReply(
        request_id="r",
        token_ids=ints(*ids),
        logprobs=floats(*logprobs),
        finish_reason="stop",
        versions=tuple(VersionSpan(*span) for span in spans),
    )
    try:
        check_reply(REQUEST, reply, VOCAB_SIZE)
    except InvalidResponse:
        return
    assert 1 <= len(ids) <= REQUEST.max_tokens
    assert len(ids) == len(logprobs)
    assert all(0 <= token < VOCAB_SIZE for token in ids)
    assert all(np.isfinite(value) and value <= 1e-5 for value in logprobs)
    assert [i for _, start, end in spans for i in range(start, end)] == list(range(len(ids)))
