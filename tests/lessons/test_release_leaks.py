"""A release holds no answer in other words: what is released is tried in the tasks' places."""

import ast
import builtins
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch

from lessons import release
from lessons.evidence import alike, plain
from lessons.exercise import BLANK, task_regions
from lessons.registry import IN_ORDER
from zero_min import activations, allocator, compression, muon, pipeline, stage1, stage2


@dataclass(frozen=True)
class Pure:
    """A task whose answer is a function of its arguments alone."""

    answer: Callable[..., Any]
    samples: Sequence[tuple[Any, ...]]
    # Of one sample: the values that an expression may be about, and the results that give the task away.
    about: Callable[..., Mapping[str, Any]] = lambda *given: {}
    secrets: Callable[..., Sequence[Any]] = lambda *given: ()


def _named(*names: str) -> Callable[..., Mapping[str, Any]]:
    return lambda *given: dict(zip(names, given, strict=True))


def _sides(shape: tuple[int, int]) -> Mapping[str, Any]:
    small, large = sorted(shape)
    return {"shape": shape, "small": small, "large": large, "rows": shape[0], "columns": shape[1]}


def _ends(start: int, end: int, rank: int, size: int) -> Sequence[Any]:
    low, high = stage2.overlap(start, end, rank, size)
    return [[low, high], high - low]


NUMBERS = torch.arange(-9.0, 23.0)
PURE = {
    "overlap": Pure(
        stage2.overlap,
        [(0, 10, 1, 4), (5, 7, 1, 4), (3, 30, 2, 5), (1, 9, 0, 4), (2, 40, 3, 7), (13, 16, 2, 5)],
        _named("start", "end", "rank", "size"),
        _ends,
    ),
    "work": Pure(
        muon.work, [((2, 5),), ((7, 3),), ((4, 4),), ((6, 11),)], _sides, lambda shape: [muon.work(shape)]
    ),
    "owners": Pure(
        muon.choose_owners, [([(2, 2), (2, 2), (4, 4)], 2), ([(8, 8), (1, 64), (1, 64), (1, 64)], 2)]
    ),
    "layers": Pure(
        pipeline.cut_layers,
        [(10, 4), (8, 4), (5, 3), (7, 2)],
        _named("layers", "ranks"),
        lambda *given: [[[*each] for each in pipeline.cut_layers(*given)]],
    ),
    "block": Pure(allocator.block_size, [(1,), (512,), (513,), (4000,), (70_000,)], _named("nbytes")),
    "segment": Pure(allocator.segment_size, [(512,), (2**20,), (2**20 + 512,), (10 * 2**20,), (15 * 2**20,)]),
    "gpipe": Pure(pipeline.gpipe, [(1, 4, 3), (0, 2, 2)]),
    "one_f_one_b": Pure(pipeline.one_f_one_b, [(2, 7, 9), (0, 4, 6), (3, 4, 6), (1, 2, 3)]),
    "interval": Pure(
        activations.best_interval,
        [(16, 1, 16), (100, 1, 1), (9, 16, 1), (10, 3, 2), (64, 1, 16)],
        _named("layers", "boundary", "block"),
        lambda *given: [activations.best_interval(*given)],
    ),
    "reorder": Pure(stage1.round_robin_reorder, [([*NUMBERS.split(5)], 3), ([*NUMBERS.split(3)], 4)]),
    "flatten": Pure(stage1.flatten_dense_tensors_aligned, [([*NUMBERS.split(7)], 5)]),
    "partition": Pure(stage1.get_data_parallel_partitions, [(NUMBERS, 5), (NUMBERS, 3)]),
    "pack": Pure(compression.pack_signs, [(NUMBERS,)]),
    "unpack": Pure(compression.unpack_signs, [(torch.tensor([129, 6], dtype=torch.uint8), torch.float32)]),
    "orthogonalize": Pure(muon.orthogonalize, [(NUMBERS.view(4, 8).clone(),)]),
}
# Statements of an answer that stand in what a lesson gives on purpose, and why.
GIVEN = {
    ("0 average", "zero_min/one_bit_adam.py"): "the average of a whole gradient, which lesson 6 builds on",
    ("1 reduce", "zero_min/one_bit_adam.py"): "gradients of all parameters, a list",
    ("1 gather", "zero_min/offload.py"): "a state on disk is exchanged as ever",
    ("1 flatten", "lessons/step8_tensor_parallel/experiment.py"): "the number of elements, a sum",
    ("3 slice", "zero_min/stage1.py"): "lesson 1's partition is called as there",
    ("6 send", "lessons/step6_zero_one_adam/experiment.py"): "a task before is called",
    ("6 send", "tests/lessons/test_task_step6.py"): "a task before is called",
    ("6 send", "tests/zero_min/test_zero_one_adam.py"): "a task before is called",
    ("6 meet", "zero_min/one_bit_adam.py"): "1-bit Adam, which 0/1 Adam changes",
}


COPIES = {"tests/zero_min/test_ring.py: cut"}  # of the pieces, where the task `partition` asks for views


@cache
def released() -> dict[str, ast.Module]:
    """All Python files of a release of all lessons, by their paths."""
    texts = release._texts(IN_ORDER)
    return {path: ast.parse(text) for path, text in texts.items() if path.endswith(".py")}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function at the top of a released file that starts nothing, and its place."""
    for path, tree in released().items():
        pure = [each for each in tree.body if isinstance(each, ast.FunctionDef) and only_computes(each)]
        pure = [each for each in pure if not BLANK.search(ast.unparse(each))]
        if pure and not path.endswith("__main__.py"):
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            yield from ((f"{path}: {each.name}", getattr(module, each.name)) for each in pure)


def only_computes(function: ast.FunctionDef) -> bool:
    """Whether it calls nothing but builtins, methods and arithmetic: no ranks, no processes."""
    called = [each.func for each in ast.walk(function) if isinstance(each, ast.Call)]
    names = {each.id for each in called if isinstance(each, ast.Name)}
    methods = {each.attr for each in called if isinstance(each, ast.Attribute)}
    known = {*dir(builtins), "pairwise", "prod", "chain", "work"} - {"open", "exec", "input"}
    return names <= known and not methods & {"run", "main", "write_text", "mkdir", "save"}


def kind(function: Callable[..., Any]) -> str:
    """What a function returns, by its annotation: a number, a tensor or many of them; else nothing."""
    said = str(inspect.signature(function).return_annotation).replace("torch.", "")
    if said.startswith(("list", "tuple", "collections.abc.Sequence")):
        return "many"
    return "one" if said.endswith(("'int'>", "'float'>", "Tensor'>")) else ""


def result(function: Callable[..., Any], *given: Any) -> Any:
    """What comes out, as plain values; the error if there is one."""
    try:
        return plain(function(*given))
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("task", PURE)
def test_no_released_function_does_a_task(task: str) -> None:
    pure = PURE[task]
    count, found = len(pure.samples[0]), []
    for place, function in functions():
        known = inspect.signature(function).parameters.values()
        fits = len([p for p in known if p.default is p.empty]) <= count <= len(known)
        fits = fits and kind(function) == kind(pure.answer) and place not in COPIES
        if fits and all(alike(result(function, *one), plain(pure.answer(*one))) for one in pure.samples):
            found.append(place)
    assert not found, f"{found} can be put in the place of task {task}"


KINDS = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call)
KINDS += (ast.Tuple, ast.List, ast.Subscript, ast.ListComp, ast.comprehension, ast.operator, ast.unaryop)
KINDS += (ast.cmpop, ast.expr_context)  # type: ignore[assignment]
CALLED = {"min", "max", "sorted", "divmod", "len", "range", "sum", "abs", "list"}


@dataclass(frozen=True)
class Expression:
    """Arithmetic of a released file, as a function of the names in it."""

    place: str
    text: str
    names: tuple[str, ...]
    code: Any


class _Names(ast.NodeTransformer):
    """Attributes such as `self.rank` become names."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = ast.unparse(node).replace(".", "_DOT_")
        return ast.Name(name, node.ctx) if name.isidentifier() else self.generic_visit(node)


@cache
def expressions() -> list[Expression]:
    """All of them that need nothing but numbers and at most five names."""
    found: dict[str, Expression] = {}
    for path, tree in released().items():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.BinOp, ast.Call, ast.Tuple, ast.ListComp, ast.IfExp)):
                continue
            inside = [*ast.walk(node)]
            calls = [each for each in inside if isinstance(each, ast.Call)]
            if not all(isinstance(each, KINDS) for each in inside) or len(inside) > 80:
                continue
            if any(not isinstance(each.func, ast.Name) or each.func.id not in CALLED for each in calls):
                continue
            if any(each.keywords for each in calls):
                continue
            text = ast.unparse(_Names().visit(ast.parse(ast.unparse(node), mode="eval")))
            names = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)]
            bound = {each.id for each in names if isinstance(each.ctx, ast.Store)}
            free = sorted({each.id for each in names} - bound - set(dir(builtins)))
            if 1 <= len(free) <= 5 and text not in found:
                code = eval(f"lambda {', '.join(free)}: {text}")  # arithmetic and nothing else: see KINDS
                found[text] = Expression(f"{path}, line {node.lineno}", text, tuple(free), code)
    return [*found.values()]


@pytest.mark.parametrize("task", [task for task, pure in PURE.items() if pure.secrets(*pure.samples[0])])
def test_no_released_expression_gives_a_task_away(task: str) -> None:
    pure, told = PURE[task], []
    pools = [pure.about(*one) for one in pure.samples]
    secrets = [pure.secrets(*one) for one in pure.samples]
    for each in expressions():
        if len(each.names) < min(2, len(pools[0])):
            continue
        for chosen in permutations(pools[0], len(each.names)):
            for number in range(len(secrets[0])):
                rows = zip(pools, secrets, strict=True)
                if all(
                    alike(result(each.code, *map(pool.get, chosen)), plain(one[number])) for pool, one in rows
                ):
                    told.append(f"{each.place}: {each.text.replace('_DOT_', '.')} of {', '.join(chosen)}")
    assert not told, f"task {task} is given away by {told}"


class _Shape(ast.NodeTransformer):
    """A piece of code without the names of its variables; names of called functions stay."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("_", ast.Load())

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            base = base.value
        return ast.Name("_", ast.Load()) if isinstance(base, ast.Name) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func).rpartition(".")[2].rstrip("_")
        given = [self.visit(each) for each in (*node.args, *(word.value for word in node.keywords))]
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            given.insert(0, self.visit(node.func.value))
        return ast.Call(ast.Name(called, ast.Load()), given, [])


COUNTED = (ast.Name, ast.Constant, ast.BinOp, ast.Call, ast.Compare, ast.Attribute, ast.Subscript, ast.IfExp)
LARGE = 9  # parts of a statement; smaller ones stand everywhere


def shapes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every large statement and expression in it without its names, and its line."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.stmt, ast.expr)) or isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if sum(isinstance(each, (*COUNTED, ast.comprehension)) for each in ast.walk(node)) >= LARGE:
            try:
                copied = ast.parse(ast.unparse(node)).body[0]
            except SyntaxError:  # a part of an f-string, say
                continue
            yield ast.dump(_Shape().visit(copied)), node.lineno


def answers() -> Iterator[tuple[str, ast.AST]]:
    """The lines of every task."""
    for lesson in IN_ORDER:
        for answer, _ in lesson.files:
            lines = answer.read_text(encoding="utf-8").splitlines()
            for region in task_regions("\n".join(lines)):
                body = textwrap.dedent("\n".join(lines[region.first : region.last]))
                code = f"def task():\n{textwrap.indent(body, '    ')}"
                yield f"{lesson.number} {region.task}", ast.parse(code)


def test_no_released_statement_is_one_of_an_answer_with_other_names() -> None:
    secret = {shape: task for task, tree in answers() for shape, _ in shapes(tree)}
    found = {
        f"task {secret[shape]}: {path}, line {line}"
        for path, tree in released().items()
        for shape, line in shapes(tree)
        if shape in secret and (secret[shape], path) not in GIVEN
    }
    assert not found, f"with other names these are lines of an answer: {found}"


def test_both_searches_find_what_was_a_leak_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once = "def count(sides):\n    a, b = sorted(sides)\n    return a * a * (2 * b + a)"
    tree = ast.parse(once)
    secret = {shape: task for task, tree in answers() for shape, _ in shapes(tree)}
    assert {secret.get(shape) for shape, _ in shapes(tree)} >= {"7 work"}
    expressions.cache_clear()
    monkeypatch.setitem(released(), "tests/once.py", tree)
    try:
        with pytest.raises(AssertionError, match=r"task work is given away by \['tests/once.py, line 3"):
            test_no_released_expression_gives_a_task_away("work")
    finally:
        expressions.cache_clear()
