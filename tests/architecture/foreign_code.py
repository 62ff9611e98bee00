"""Finds code that could run what came over a wire or from a file, however it is spelled.

Names are resolved through the imports of the module (`from pickle import loads as l`, `import numpy as n`), and a bare
mention counts, not only a call: `map(eval, texts)` is found. Modules that are looked up by name (`import_module`,
`getattr`, `__builtins__[...]`) are found when the name is written out; where it is not, the file must be on a list.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "jsonpickle", "marshal", "shelve", "joblib", "imp"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
NAMES = {
    "torch.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.hub.load",
    "torch.distributed.checkpoint.filesystem.FileSystemReader",
    "torch.distributed.checkpoint.FileSystemReader",
    "numpy.load",
    "numpy.lib.npyio.load",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "code.interact",
    "multiprocessing.Queue",
    "multiprocessing.Pipe",
    "multiprocessing.Manager",
    "concurrent.futures.ProcessPoolExecutor",
    "asyncio.create_subprocess_shell",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
"""Attributes of any object: pyzmq's and torch.distributed's pickling."""
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Arguments that must be a literal False, if they are given at all."""
LOOKUPS = {"getattr", "importlib.import_module", "builtins.getattr"}


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in `tree` that must not be there."""
    names = imported_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        yield from ((line, name) for name in _imports(node) if name.split(".")[0] in MODULES or name in NAMES)
        yield from ((line, name) for name in _mentions(node, names))
        yield from ((line, f"{node.arg} = ...") for node in _keywords(node))
        yield from ((line, f"{name!r} by name") for name in _lookups(node, names))


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name of a module stands for: `{"np": "numpy", "l": "pickle.loads"}`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """`numpy.load` for `np.load`; empty for what is no dotted name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = full_name(node.value, names)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def dynamic_imports(tree: ast.AST) -> list[int]:
    """Lines that import a module whose name is not written out."""
    names = imported_names(tree)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and full_name(node.func, names) in ("importlib.import_module", "runpy.run_module", "runpy.run_path")
        and not (node.args and isinstance(node.args[0], ast.Constant))
    ]


def secret_comparisons(tree: ast.AST) -> list[int]:
    """Lines that compare a secret with `==`, `!=` or `in`, which takes the longer the more of it is right."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops
        ):
            words = {_last_word(side) for side in (node.left, *node.comparators)}
            if words & {"token", "secret", "password", "authorization", "bearer"}:
                lines.append(node.lineno)
    return lines


def parse(path: Path) -> ast.Module:
    """The tree of a file."""
    return ast.parse(path.read_text(), str(path))


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _mentions(node: ast.AST, names: dict[str, str]) -> list[str]:
    """Forbidden names that are read; a field or a variable of ours may be called `eval`."""
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return []
    name = full_name(node, names)
    is_builtin = (isinstance(node, ast.Name) or name.startswith("builtins.")) and (
        name.removeprefix("builtins.") in BUILTINS
    )
    is_method = isinstance(node, ast.Attribute) and node.attr in METHODS
    return [name] if is_builtin or is_method or name in NAMES else []


def _keywords(node: ast.AST) -> list[ast.keyword]:
    if not isinstance(node, ast.keyword) or node.arg not in KEYWORDS:
        return []
    is_false = isinstance(node.value, ast.Constant) and node.value.value is False
    return [] if is_false else [node]


def _lookups(node: ast.AST, names: dict[str, str]) -> list[str]:
    """Forbidden names that are looked up as text."""
    if isinstance(node, ast.Call) and full_name(node.func, names) in LOOKUPS:
        words = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        words = (
            [node.slice.value] if _last_word(node.value) in ("__builtins__", "__dict__", "modules", "globals") else []
        )
    else:
        return []
    return [
        str(word) for word in words if str(word).split(".")[0] in MODULES | BUILTINS or str(word) in ("load", "loads")
    ]


def _last_word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lower()
        case ast.Call(func=function):
            return _last_word(function)
        case ast.Subscript(slice=ast.Constant(value=str(word))):
            return word.lower()
    return ""
