"""A user's own function is found by its path; what is wrong with it is one line that names the config key."""

import pytest

from runtime.base.imported import load_function
from runtime.errors import UserError

NUMBER = 3


def scaled(value: float, *, scale: float) -> float:
    return value * scale


def test_a_function_is_found_and_not_called() -> None:
    assert load_function(f"{__name__}:scaled", {"scale": 2.0}, section="loss") is scaled


@pytest.mark.parametrize(
    ("path", "kwargs", "said"),
    [
        ("no.such.module:f", {}, r"'no\.such\.module:f': No module named .* \(is its folder on PYTHONPATH\?\)"),
        (f"{__name__}:missing", {}, "has no attribute 'missing'"),
        (f"{__name__}:NUMBER", {}, "is a int, not a function"),
        (f"{__name__}:scaled", {"sale": 1}, r"cannot be called with loss\.kwargs {'sale': 1}: .*'s(c)?ale'"),
        (f"{__name__}:test_a_function_is_found_and_not_called", {}, "too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_is_the_users_mistake(path: str, kwargs: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_function(path, kwargs, section="loss")
    assert str(caught.value).startswith(f"loss.import_path = {path!r}")
