"""Find uses of DeepSpeed beyond names: arguments, engine methods, parameter attributes, configurations."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from zero_full.migrate.name_table import ADAM, ADAM_ARGUMENTS, ARGUMENTS, ENGINE, FOREIGN, PARAMETER
from zero_full.migrate.rewrite import ManualChange, Rewrite
from zero_full.migrate.scopes import ROOT

POSITIONAL = 6  # positional arguments of initialize before the first unsupported one
SAME_IN_ADAMS = 5  # positional arguments that DeepSpeed's two Adams have in common, up to eps
IMPORT_FUNCTIONS = {  # functions that take a package name
    *("import_module", "__import__", "find_spec", "importorskip", "version", "metadata", "getLogger"),
}
ATTRIBUTE_FUNCTIONS = {"hasattr", "getattr", "setattr", "delattr"}
UNKNOWN = object()  # marks a value that is computed at run time


def find_other_uses(rewrite: Rewrite) -> Iterator[ManualChange]:
    """Yield the uses that renaming does not solve, with their lines."""
    engines = set(_engines(rewrite))
    for node in ast.walk(rewrite.tree):
        if isinstance(node, ast.Call):
            if rewrite.new_names.get(node.func) == "zero_full.initialize":
                yield from _initialize_arguments(node)
            if rewrite.new_names.get(node.func) == ADAM:
                yield from _adam_arguments(node)
            yield from _package_names(node)
            yield from _parameter_attributes(
                node, node.args[1:2] if getattr(node.func, "id", "") in ATTRIBUTE_FUNCTIONS else ()
            )
        elif isinstance(node, ast.Attribute):
            yield from _parameter_attributes(node, [ast.Constant(node.attr)])
            used = node.attr in ENGINE and ast.unparse(node.value) in engines
            if used and node.attr in missing_of_engines():  # this imports torch
                yield ManualChange(node.lineno, f"Engine has no {node.attr}. Instead: {ENGINE[node.attr]}")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in FOREIGN and (node.module or "").split(".")[0] != ROOT:
                    yield ManualChange(node.lineno, _runs_deepspeed(alias.name, FOREIGN[alias.name]))


def _parameter_attributes(node: ast.expr, names: Iterable[ast.expr]) -> Iterator[ManualChange]:
    for name in names:
        mark = name.value if isinstance(name, ast.Constant) else None
        if isinstance(mark, str) and mark in PARAMETER:
            yield ManualChange(node.lineno, f"parameters have no {mark}. Instead: {PARAMETER[mark]}")


def configurations(rewrite: Rewrite) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the literal configurations in the script, with their lines. Computed values are left out."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(rewrite.tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                assigned.setdefault(target.id, []).append(node.value)
    for node in ast.walk(rewrite.tree):
        if isinstance(node, ast.Call) and rewrite.new_names.get(node.func) == "zero_full.initialize":
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
            (_literal(k) if k else UNKNOWN, _literal(v)) for k, v in zip(node.keys, node.values, strict=True)
        ]
        return {key: value for key, value in pairs if key is not UNKNOWN and value is not UNKNOWN}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _engines(rewrite: Rewrite) -> Iterator[str]:
    """Yield the names of variables that hold engines: the first result of `initialize`."""
    for node in ast.walk(rewrite.tree):
        if not isinstance(node, ast.Assign):
            continue
        value, first = node.value, False
        if isinstance(value, ast.Subscript):
            value, first = value.value, True
        if isinstance(value, ast.Call) and rewrite.new_names.get(value.func) == "zero_full.initialize":
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


def _initialize_arguments(call: ast.Call) -> Iterator[ManualChange]:
    for keyword in call.keywords:
        if keyword.arg in ARGUMENTS:
            text = f"initialize has no argument {keyword.arg}. Instead: {ARGUMENTS[keyword.arg]}"
            yield ManualChange(keyword.value.lineno, text)
    if len(call.args) > POSITIONAL:
        yield ManualChange(
            call.lineno, "initialize has no distributed_port: pass the arguments after lr_scheduler by name"
        )


def _adam_arguments(call: ast.Call) -> Iterator[ManualChange]:
    for keyword in call.keywords:
        if keyword.arg in ADAM_ARGUMENTS:
            text = f"FusedAdam has no argument {keyword.arg}. Instead: {ADAM_ARGUMENTS[keyword.arg]}"
            yield ManualChange(keyword.value.lineno, text)
    if len(call.args) > SAME_IN_ADAMS:
        yield ManualChange(call.lineno, "FusedAdam: pass the arguments after eps by name")


def _package_names(call: ast.Call) -> Iterator[ManualChange]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for value in call.args if name in IMPORT_FUNCTIONS else ():
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(rf"{ROOT}(\.\w+)*", text):
            yield ManualChange(
                value.lineno, f'{name}("{text}") names the package deepspeed. Instead: "zero_full"'
            )
    for keyword in call.keywords:
        if keyword.arg == ROOT and name.endswith("TrainingArguments"):
            text = _runs_deepspeed(f"{name}(deepspeed=...)", "transformers")
            yield ManualChange(keyword.value.lineno, text)


def _runs_deepspeed(cause: str, library: str) -> str:
    instead = "your own loop with zero_full.initialize"
    if library != "Lightning":
        instead = f"the script unchanged, by python -m zero_full as-deepspeed; or {instead}"
    return f"{cause} makes {library} run DeepSpeed itself. Instead: {instead}"
