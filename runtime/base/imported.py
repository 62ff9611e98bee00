"""Functions of the user's own, named in a config as `package.module:function`."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import UserError


def load_function(import_path: str, kwargs: Mapping[str, object], *, section: str) -> Callable[..., Any]:
    """The function at `import_path`, which takes one positional argument and `kwargs`; it is not called.

    Both are keys of the config's `section`. Raises `UserError`, which names the key and says what is wrong.
    """
    where = f"{section}.import_path = {import_path!r}"
    module_name, _, name = import_path.partition(":")
    try:
        function: object = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise UserError(f"{where}: {error} (is its folder on PYTHONPATH?)") from error
    except AttributeError as error:
        raise UserError(f"{where}: {error}") from error
    if not callable(function):
        raise UserError(f"{where} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(None, **kwargs)
    except TypeError as error:
        raise UserError(f"{where} cannot be called with {section}.kwargs {dict(kwargs)}: {error}") from error
    return function
