"""Find uses of DeepSpeed beyond names: arguments, engine methods, parameter attributes, configurations."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zero_full.migrate.names import ARGUMENTS, ENGINE, FOREIGN, PARAMETER
from zero_full.migrate.scopes import ROOT
from zero_full.migrate.script import Leftover, Rewrite

POSITIONAL = 6  # positional arguments of initialize before the first unsupported one
BY_NAME = {  # functions that take a package name
    *("import_module", "__import__", "find_spec", "importorskip", "version", "metadata", "getLogger"),
}
ASKS = {"hasattr", "getattr", "setattr", "delattr"}
OPEN = object()  # marks a value that is computed at run time


def look_at_calls(rewrite: Rewrite) -> Iterator[Leftover]:
    """Yield the uses that renaming does not solve, with their lines."""
    engines = set(_engines(rewrite))
    missing = missing_of_engines()
    for node in ast.walk(rewrite.tree):
        if isinstance(node, ast.Call):
            if rewrite.meant.get(node.func) == "zero_full.initialize":
                yield from _arguments(node)
            yield from _by_name(node)
            yield from _marks(node, node.args[1:2] if getattr(node.func, "id", "") in ASKS else ())
        elif isinstance(node, ast.Attribute):
            yield from _marks(node, [ast.Constant(node.attr)])
            if node.attr in missing and ast.unparse(node.value) in engines:
                yield Leftover(node.lineno, f"Engine has no {node.attr}. Instead: {missing[node.attr]}")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in FOREIGN and (node.module or "").split(".")[0] != ROOT:
                    told = f"{alias.name} makes {FOREIGN[alias.name]} run DeepSpeed itself"
                    yield Leftover(
                        node.lineno, f"{told}. Instead: a loop of your own with zero_full.initialize"
                    )


def _marks(node: ast.expr, names: Iterable[ast.expr]) -> Iterator[Leftover]:
    for name in names:
        mark = name.value if isinstance(name, ast.Constant) else None
        if isinstance(mark, str) and mark in PARAMETER:
            yield Leftover(node.lineno, f"parameters have no {mark} here. Instead: {PARAMETER[mark]}")


def configurations(rewrite: Rewrite) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the literal configurations in the script, with their lines. Computed values are left out."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(rewrite.tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                assigned.setdefault(target.id, []).append(node.value)
    for node in ast.walk(rewrite.tree):
        if isinstance(node, ast.Call) and rewrite.meant.get(node.func) == "zero_full.initialize":
            for keyword in node.keywords:
                if keyword.arg in ("config", "config_params"):
                    values = [keyword.value]
                    if isinstance(keyword.value, ast.Name):
                        values = assigned.get(keyword.value.id, [])
                    written = [value for value in values if isinstance(value, ast.Dict)]
                    if len(written) == 1:
                        yield written[0].lineno, _literal(written[0])


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        pairs = [
            (_literal(k) if k else OPEN, _literal(v)) for k, v in zip(node.keys, node.values, strict=True)
        ]
        return {key: value for key, value in pairs if key is not OPEN and value is not OPEN}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return OPEN


def _engines(rewrite: Rewrite) -> Iterator[str]:
    """Yield the names of variables that hold engines: the first result of `initialize`."""
    for node in ast.walk(rewrite.tree):
        if not isinstance(node, ast.Assign):
            continue
        value, first = node.value, False
        if isinstance(value, ast.Subscript):
            value, first = value.value, True
        if isinstance(value, ast.Call) and rewrite.meant.get(value.func) == "zero_full.initialize":
            for target in node.targets:
                if first:
                    yield ast.unparse(target)
                elif isinstance(target, ast.Tuple | ast.List) and target.elts:
                    yield ast.unparse(target.elts[0])


def missing_of_engines() -> dict[str, str]:
    """Return the methods of DeepSpeed's engine that zero_full's lacks, with advice."""
    try:
        from zero_full.engine.engine import Engine
    except ImportError:  # without torch, assume that all are missing
        return ENGINE
    return {name: text for name, text in ENGINE.items() if not hasattr(Engine, name)}


def _arguments(call: ast.Call) -> Iterator[Leftover]:
    for keyword in call.keywords:
        if keyword.arg in ARGUMENTS:
            told = f"initialize has no argument {keyword.arg}. Instead: {ARGUMENTS[keyword.arg]}"
            yield Leftover(keyword.value.lineno, told)
    if len(call.args) > POSITIONAL:
        yield Leftover(
            call.lineno, "initialize has no distributed_port: pass what comes after lr_scheduler by name"
        )


def _by_name(call: ast.Call) -> Iterator[Leftover]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for value in call.args if name in BY_NAME else ():
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(rf"{ROOT}(\.\w+)*", text):
            yield Leftover(
                value.lineno, f'{name}("{text}") asks for DeepSpeed by its name. Instead: "zero_full"'
            )
    for keyword in call.keywords:
        if keyword.arg == ROOT and name.endswith("TrainingArguments"):
            told = f"{name}(deepspeed=...) makes transformers run DeepSpeed itself"
            yield Leftover(
                keyword.value.lineno, f"{told}. Instead: a loop of your own with zero_full.initialize"
            )
