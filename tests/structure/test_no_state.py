"""Ranks may be threads of one process: what belongs to a rank is in no module.

What modules hold is constant, or it is in a list here, with its reason.
"""

import ast
import logging
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, GenericAlias, MethodDescriptorType, ModuleType
from typing import Any, ParamSpec, TypeVar, get_origin

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "zero_full"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "examples"]
STATE = {
    "comm.communicator._alive": "for a forked child, which must let go of all groups; keeps nobody alive",
    "shard.group.registry._owners": "by parameter, of which each belongs to one rank; keeps nobody alive",
    "shard.group.registry.opened": "by tensor, of which each belongs to one rank; keeps nobody alive",
    "shard.access.gathered_parameters._is_guarded": "each thread has its own",
    "construct.session.local": "each thread has its own",
    "construct.generators._generator_lock": "a lock for torch's generator, of which a process has one",
    "construct.generators._stamps": "counts, so that no two stamps in a process are alike",
    "kernels.ops.LIBRARY": "the operators are registered with torch, once in a process",
}
CACHES = {  # of what depends on the arguments alone
    "construct.recording.draws_numbers": "by operation of torch",
    "construct.recording._written_arguments": "by operation of torch",
    "construct.recorded_tensor._recorded_kind": "by class",
    "construct.recorded_tensor._nothing": "one number by dtype, which nobody writes",
    "construct.recorded_tensor._shown": "windows into that number, by dtype and shape",
    "shard.group.parameters.placeholder_scalar": "one number by dtype and device, behind released parameters",
    "shard.group.released.released_class": "by class",
    "fit.grammar.families": "of a file of the package, which nobody writes",
    "kernels.toolchain._output_of": "what a compiler of this machine says of itself",
    "kernels.files._functions": "of a library that is loaded, by path",
    "kernels.files._libc": "of the C library",
    "kernels.crc32.crc32_function": "of the library that this machine has",
    "kernels.load.load": "operators are compiled and loaded once in a process, by device",
    "kernels.load.compiled_for": "the same answer, by device",
    "kernels.load.operators": "the same, by device",
    "shard.passes.module_hooks._exclude_from_compilation": "changes a class, when the first hook is made",
    "precision.norms.has_fp64": "of a device, which does not change",
}
WRITES = re.compile(r"append|extend|insert|add|update|setdefault|pop|popitem|remove|discard|clear|sort")
CONSTANT = (
    attrgetter,
    *(int, float, str, bytes, complex, type(None), type, FunctionType, ModuleType, re.Pattern, timedelta),
    *(TypeVar, ParamSpec, GenericAlias, BuiltinFunctionType, MethodDescriptorType, logging.Logger, Path),
    *(torch.dtype, torch.device, torch.finfo),
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def names_of(tree: ast.Module) -> Iterator[str]:
    """What a module binds by assignments at its top level."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else ():
            yield from (each.id for each in ast.walk(target or node) if isinstance(each, ast.Name))


def is_constant(value: Any) -> bool:
    """Whether it cannot change, as far as its type says."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    kind: Any = type(value)
    frozen = is_dataclass(value) and kind.__dataclass_params__.frozen
    frozen = frozen or getattr(kind, "model_config", {}).get("frozen", False)  # pydantic's
    of_types = get_origin(value) is not None or kind.__module__ in ("types", "typing")
    return isinstance(value, CONSTANT) or kind is object or frozen or of_types


def written_names(tree: ast.Module) -> Iterator[str]:
    """The names by which functions of a file change something."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (node for function in functions for node in ast.walk(function)):
        changed: ast.expr | None = None
        if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if WRITES.fullmatch(node.func.attr) else None
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        if isinstance(changed, ast.Name):
            yield changed.id


@cache
def trees() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(path.read_text()) for path in FILES if path.stem != "__main__"}


@cache
def written() -> dict[str, set[str]]:
    return {module: set(written_names(tree)) for module, tree in trees().items()}


@pytest.mark.parametrize("module", sorted(trees()))
def test_modules_hold_constants(module: str) -> None:
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        pytest.skip("needs Lightning: `make test-lightning` installs it")
    for name in names_of(trees()[module]):
        value = getattr(loaded, name, None)
        is_table = isinstance(value, (dict, list, set)) and (name.isupper() or name == "__all__")
        full = f"{module}.{name}".removeprefix("zero_full.")
        fine = is_constant(value) or full in STATE
        assert fine or is_table, f"{full} can change: give it to whom it belongs, or a reason to STATE"
        if is_table:
            writers = [other for other, names in written().items() if name in names]
            assert not writers, f"{full} is a table, and {writers} changes it"


@pytest.mark.parametrize("module", sorted(trees()))
def test_no_function_assigns_to_its_module(module: str) -> None:
    assert not [node for node in ast.walk(trees()[module]) if isinstance(node, ast.Global)]


def test_caches_are_of_what_depends_on_the_arguments_alone() -> None:
    found = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                ways = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
                if ways & {"cache", "lru_cache"}:
                    found.add(f"{module}.{node.name}".removeprefix("zero_full."))
    assert found == CACHES.keys()


def test_every_reason_is_needed() -> None:
    bound = {f"{module}.{name}" for module, tree in trees().items() for name in names_of(tree)}
    assert {f"zero_full.{name}" for name in STATE} <= bound


def test_the_search_finds() -> None:
    assert not is_constant([]) and not is_constant(({},)) and is_constant((1, "a", torch.float32))
    for line in ("A[1] = 2", "A.append(2)", "del A[1]", "A |= {3}", "A.x = 1"):
        assert "A" in written_names(ast.parse(f"def f():\n    {line}")), line
    assert not list(written_names(ast.parse("def f():\n    return A[1], A.get(2)")))
