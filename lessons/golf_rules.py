"""What a schedule on the public golf board may not contain, found without running it.

A schedule computes with torch and `zero_min`, talks to other ranks by `comm`, and keeps tensors. The meter
counts what goes through torch and `comm`. So a schedule must not reach the meter, nor another rank by
another way, nor hold numbers outside of torch. These rules name the plain ways to do that. They do not stop
a determined forger: a person reads each entry before it is merged.
"""

import ast
from collections.abc import Iterator

from lessons import sandbox
from zero_min.comm import Comm
from zero_min.ledger import Ledger
from zero_min.thread_comm import ThreadComm

METER = {name for kind in (Ledger, Comm, ThreadComm) for name in dir(kind)} | {
    "ledger",
    "world",
    "peak",
    "sent",
}
HIDDEN = {
    "numpy",
    "tolist",
    "save",
    "from_file",
    "ledger",
    "world",
    "multiprocessing",
    "distributed",
    "__class__",
}
CALLS = {"setattr", "delattr", "getattr", "bytearray", "memoryview"}
CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "clear", "remove"}


def broken(source: str) -> list[str]:
    """Each line that breaks a rule, with the reason; a file that is no Python is one of them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [f"line {getattr(error, 'lineno', 0)}: it is not Python: {error}"]
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    reaching = {each for each in sandbox.refusals(source) if each[1] != "uses .modules"}  # of a model
    found = reaching | {*_of_golf(tree, imported)}
    return [f"line {line}: {what}" for line, what in sorted(found)]


def _of_golf(tree: ast.AST, imported: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]:
                private = [part for part in name.split(".") if part.startswith("_") and part != "_pytree"]
                if private and name != "__future__":
                    yield node.lineno, f"imports {name}, which is private"
        elif isinstance(node, ast.Name) and node.id in CALLS:
            yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node, imported)
        elif isinstance(node, ast.Subscript) and _is_stored(node) and _root(node) in imported:
            yield node.lineno, f"changes {ast.unparse(node)}, which all ranks share"
        elif isinstance(node, ast.Call) and _changes(node.func, imported):
            yield node.lineno, f"calls {ast.unparse(node.func)}, which changes what all ranks share"


def _changes(called: ast.expr, imported: set[str]) -> bool:
    return isinstance(called, ast.Attribute) and called.attr in CHANGES and _root(called) in imported


def _attribute(node: ast.Attribute, imported: set[str]) -> Iterator[tuple[int, str]]:
    own = isinstance(node.value, ast.Name) and node.value.id == "self"
    base = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super"
    if node.attr in HIDDEN and not own:
        yield node.lineno, f"uses .{node.attr}, which the meter does not see, or belongs to it"
    if node.attr.startswith("_") and not node.attr.startswith("__") and not own and not base:
        yield node.lineno, f"uses .{node.attr}, which is private"
    if _is_stored(node) and _root(node) in imported:
        yield node.lineno, f"changes {ast.unparse(node)}, which all ranks share"
    elif _is_stored(node) and not own and node.attr in METER:
        yield node.lineno, f"changes .{node.attr}, which belongs to the meter"


def _is_stored(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _root(node: ast.AST) -> str:
    """The name that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
