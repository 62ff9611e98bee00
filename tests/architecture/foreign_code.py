"""Finds code that could run what came over a wire or from a file, where ruff does not see it.

Ruff bans modules and functions by name, however they are imported (`TID251` and `S` in pyproject.toml). What is left:
builtins that are only mentioned (`map(eval, texts)`), methods of any object, arguments that must be False, and names
that are looked up as text (`getattr`, `import_module`, `sys.modules[...]`).
"""

import ast
from collections.abc import Iterator

BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "jsonpickle", "marshal", "shelve", "joblib", "imp"}
METHODS = {
    *("recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
}
"""Pickling of pyzmq and torch.distributed."""
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Arguments that must be a literal False, if they are given at all."""
IMPORTERS = {"import_module", "run_module", "run_path"}
SECRETS = {"token", "secret", "password", "authorization", "bearer"}


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in `tree` that must not be there."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS:
                yield node.lineno, name
            case ast.Attribute(attr=name) if name in METHODS:
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield node.lineno, f"{name} = ..."
            case ast.Call(func=function, args=arguments) if _last_word(function) in {"getattr", *IMPORTERS}:
                yield from ((node.lineno, f"{word!r} by name") for word in _forbidden(arguments))
            case ast.Subscript(value=value, slice=key) if _last_word(value) in (
                *("__builtins__", "__dict__", "modules", "globals"),
            ):
                yield from ((node.lineno, f"{word!r} by name") for word in _forbidden([key]))


def dynamic_imports(tree: ast.AST) -> list[int]:
    """Lines that import a module whose name is not written out."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _last_word(node.func) in IMPORTERS
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]


def secret_comparisons(tree: ast.AST) -> list[int]:
    """Lines that compare a secret with `==`, `!=` or `in`, which takes the longer the more of it is right."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops)
        and SECRETS & {_last_word(side) for side in (node.left, *node.comparators)}
    ]


def _forbidden(arguments: list[ast.expr]) -> list[str]:
    words = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
    return [word for word in words if word.split(".")[0] in MODULES | BUILTINS or word in ("load", "loads")]


def _last_word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower()
        case ast.Call(func=function):
            return _last_word(function)
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word.lower()
    return ""
