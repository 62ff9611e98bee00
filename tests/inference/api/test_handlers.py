"""What both engines answer when a request fails."""

import json

import pytest
from loguru import logger

from inference.api.handlers import check_admin_token, failure_answer, too_large
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
