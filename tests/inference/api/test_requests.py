"""What a client may ask, and the reason it is told when it may not.

What both engines answer when a request fails.

Chat requests become jobs: messages to tokens by the model's own template, defaults, stops and seeds.
"""

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from loguru import logger
from transformers import PreTrainedModel

from inference.api.arrays import Int32s
from inference.api.chat_request import ChatTokenizer, cut_at_stop, decode_chat, jobs_of, plain_messages, stop_strings
from inference.api.engine import EngineLimits
from inference.api.generation import Completion, Job
from inference.api.handlers import check_admin_token, failure_answer, too_large
from inference.api.requests import GENERATE, decode_body, job_of, reply_of
from inference.config import InferenceConfig, ServedModelConfig
from inference.errors import (
    AdminDisabled,
    BadRequest,
    BodyTooLarge,
    InferenceError,
    QueueFull,
    UnknownModel,
    WeightsRefused,
    WrongAdminToken,
)
from inference.torch_engine.loading import load_tokenizer
from tests.support.models import VOCAB_SIZE, make_tokenizer
from transport.wire.codec import encode
from transport.wire.generation import GenerateRequest
from transport.wire.sample import EncodedTensor, VersionSpan

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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest, 400),
        (WrongAdminToken, 401),
        (AdminDisabled, 403),
        (UnknownModel, 404),
        (WeightsRefused, 409),
        (BodyTooLarge, 413),
        (QueueFull, 429),
    ],
)
def test_every_error_has_one_json_shape(error: type[InferenceError], status: int) -> None:
    answer = failure_answer(error("because"), "GET /", logger)
    assert (answer.status, answer.content_type) == (status, "application/json")
    assert json.loads(answer.body) == {"error": {"message": "because", "type": error.kind}}
    assert answer.headers == ({"Retry-After": "1"} if error is QueueFull else {})


def test_bug_is_a_500_without_details() -> None:
    answer = failure_answer(ZeroDivisionError("secret detail"), "GET /", logger)
    assert answer.status == 500
    assert b"secret detail" not in answer.body
    assert b"internal error: ZeroDivisionError" in answer.body


def test_admin_token_is_needed() -> None:
    check_admin_token("secret", b"Bearer secret")
    with pytest.raises(AdminDisabled, match="start the server with admin_token_file"):
        check_admin_token(None, b"Bearer None")
    for given in (b"", b"Bearer wrong", b"Basic secret", b"\xff"):
        with pytest.raises(WrongAdminToken, match="missing or wrong"):
            check_admin_token("secret", given)


def test_body_that_is_too_large_names_the_limit() -> None:
    assert str(too_large(7)) == "the body is larger than 7 bytes"


CHAT_LIMITS = EngineLimits(vocab_size=VOCAB_SIZE, max_model_len=64, max_batch_size=4, max_waiting=4)

PROMPT = np.array([1, 3, 5, 4], dtype=np.int32)


def jobs(**fields: object) -> list[Job]:
    request = decode_chat(json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode())
    return jobs_of(request, PROMPT, ChatTokenizer(make_tokenizer()), CHAT_LIMITS)


def ids(text: str) -> Int32s:
    return np.array(make_tokenizer()(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def test_defaults_are_openais() -> None:
    [job] = jobs()
    assert (job.temperature, job.top_p, job.seed, job.num_top_logprobs) == (1.0, 1.0, None, 0)
    assert job.max_tokens == 60
    assert job.should_stop is None


def test_newer_name_of_the_token_limit_wins() -> None:
    assert jobs(max_tokens=5)[0].max_tokens == 5
    assert jobs(max_completion_tokens=7)[0].max_tokens == 7
    assert jobs(max_tokens=5, max_completion_tokens=7)[0].max_tokens == 7


@pytest.mark.parametrize("top_p", [0.0, 1.1])
def test_top_p_outside_of_its_range_is_refused(top_p: float) -> None:
    with pytest.raises(BadRequest, match="top_p"):
        jobs(top_p=top_p)


def test_choices_have_seeds_of_their_own() -> None:
    assert [job.seed for job in jobs(n=3, seed=10)] == [10, 11, 12]
    assert [job.seed for job in jobs(n=2)] == [None, None]


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("ab", ("ab",)), (["ab", "c"], ("ab", "c")), ([], ())])
def test_stop_is_one_string_or_several(stop: object, expected: tuple[str, ...]) -> None:
    request = decode_chat(json.dumps({"messages": [], "stop": stop}).encode())
    assert stop_strings(request) == expected


def test_stop_watch_sees_a_string_over_several_tokens_once_it_is_complete() -> None:
    watch = jobs(stop=["stop here"])[0].should_stop
    assert watch is not None
    tokens = ids("some text before it, then stop here")
    assert [watch(tokens[:end]) for end in range(1, len(tokens) + 1)] == [False] * (len(tokens) - 1) + [True]


def test_text_is_cut_at_the_earliest_stop() -> None:
    assert cut_at_stop("one two three", ("three", "two")) == "one "
    assert cut_at_stop("one two three", ("four",)) == "one two three"
    assert cut_at_stop("one", ()) == "one"


def test_text_parts_are_joined_and_other_fields_stay() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": content, "name": "n"}, {"role": "assistant", "content": None}]
    request = decode_chat(json.dumps({"messages": messages}).encode())
    assert plain_messages(request) == [
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": [1]}', b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_chat_request_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not a valid ChatRequest"):
        decode_chat(body)


MESSAGES = [{"role": "user", "content": "hello"}]


def loaded(path: Path) -> ChatTokenizer:
    return load_tokenizer(InferenceConfig(model=ServedModelConfig(path=path)))


def test_chat_is_encoded_up_to_where_the_assistant_speaks(model_dir: Path) -> None:
    ids = loaded(model_dir).encode_chat(MESSAGES, {})
    assert ids.dtype == np.int32
    assert make_tokenizer().decode(ids) == "<bos><user>hello<assistant>"


def test_text_has_no_special_tokens_but_single_tokens_do(model_dir: Path) -> None:
    tokenizer = loaded(model_dir)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES, {})) == "hello"
    assert tokenizer.token_text(2) == "<eos>"


def test_token_beyond_the_tokenizer_has_no_text(model_dir: Path) -> None:
    assert loaded(model_dir).decode(np.array([5, 4000, 6], dtype=np.int32)) == "ab"


def test_folder_without_tokenizer_serves_all_but_chat(tmp_path: Path, model: PreTrainedModel) -> None:
    model.config.save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="chat is not possible"):
        loaded(tmp_path).encode_chat(MESSAGES, {})


def test_tokenizer_without_template_is_told_apart(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="no chat template"):
        loaded(tmp_path).encode_chat(MESSAGES, {})


def test_messages_that_the_template_refuses_are_the_callers_mistake() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadRequest, match="roles must alternate"):
        ChatTokenizer(tokenizer).encode_chat(MESSAGES, {})


def test_template_arguments_reach_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 'on' if thinking else 'off' }}"
    chat = ChatTokenizer(tokenizer)
    assert chat.decode(chat.encode_chat(MESSAGES, {"thinking": True})) == "on"
    assert chat.decode(chat.encode_chat(MESSAGES, {})) == "off"


def test_two_threads_may_use_it_at_once(model_dir: Path) -> None:
    tokenizer, failures = loaded(model_dir), []

    def work(encode: bool) -> None:
        try:
            for _ in range(200):
                if encode:
                    tokenizer.encode_chat(MESSAGES, {})
                else:
                    tokenizer.decode(np.arange(5, 30, dtype=np.int32))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(encode,)) for encode in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
