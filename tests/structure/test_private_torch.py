"""Private parts of torch are named in `zero_full/_compat.py` only, where each has its reason beside it.

A name with an underscore in front is torch's if torch has it, or if zero_full defines no such name. Names in
strings count, too: `getattr(tensor, "_version")` depends on torch as much as `tensor._version` does.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as all_optimizers

PACKAGE = Path(__file__).parents[2] / "zero_full"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_compat.py"]
PRIVATE = re.compile(r"(?<!\w)_(?!_)\w+")
PARTS = (  # things of torch that have private names
    *(
        torch,
        dist,
        dist.distributed_c10d,
        dist.ProcessGroup,
        all_optimizers,
        torch.optim.SGD([torch.ones(1)]),
    ),
    *(Tensor, nn.Parameter, torch.UntypedStorage, torch.Generator, torch.autograd.Variable),
    *(nn.Linear(1, 1), nn.modules.module, nn.modules.batchnorm, torch.ops.aten.add.Tensor),
)
TORCHS = {name for part in PARTS for name in dir(part) if PRIVATE.fullmatch(name)}
TORCHS |= {"_is_param", "_opt_called", "_wrapped_by_lr_sched"}  # marks that it sets while it runs
PYTHONS = {"_make", "_replace", "_asdict", "_getframe", "_exit"}  # of named tuples, sys, os
DERIVED = {"Tensor", "Parameter", "Module", "Optimizer", "ParameterCandidate"}  # torch asks for more of these
# These still do it. The list must become empty.


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a file gives to functions, variables and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@cache
def ours() -> set[str]:
    return {name for path in FILES for name in defined(ast.parse(path.read_text()))} | PYTHONS


def private_names(tree: ast.Module) -> Iterator[str]:
    """What a file uses of torch's private parts, with the line."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # documentation
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            known = ours() if is_own(node) else ours() - TORCHS
            used = [node.attr] if node.attr not in known else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            used = [name for name in PRIVATE.findall(node.value) if name in TORCHS]
        elif isinstance(node, ast.ClassDef) and DERIVED & {ast.unparse(base) for base in node.bases}:
            used = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            used = [name for name in used if name in TORCHS]
        yield from (f"{name} (line {node.lineno})" for name in used if PRIVATE.search(name))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_parts_of_torch_are_named_in_compat_only(path: Path) -> None:
    found = list(private_names(ast.parse(path.read_text())))
    assert not found, f"{name_of(path)} uses {', '.join(found)}: give _compat a helper for it"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._C",
        "from torch.utils._device import DeviceContext",
        "from torch import _foreach_add_",
        "tensor._version",
        "storage._cdata",
        "torch._C.DisableTorchFunction()",
        "optimizer._opt_called = True",
        "torch_optimizer._global_optimizer_pre_hooks",
        "group._get_backend(device)",
        "self._optimizer_step_pre_hooks",
        'getattr(tensor, "_version")',
        'names = "grad _base"',
        "class Mine(Tensor):\n    def _is_param(self): ...",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert list(private_names(ast.parse(line)))


@pytest.mark.parametrize("line", ["tensor._record.twin", "span._replace(at=0)", '"""Of _version."""'])
def test_the_search_leaves_alone(line: str) -> None:
    assert not list(private_names(ast.parse(line)))
