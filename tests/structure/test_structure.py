"""The shape of the code: who imports whom, how long things are, and that public names are explained."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["zero_min", "zero_full", "lessons"]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERY_FILE = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
ALLOWED = {  # a package may import itself and these of ours
    "zero_min": set(),
    "zero_full": set(),
    "lessons": {"zero_min"},
}
ROOMS = {  # and a room of zero_full only itself and these; what is not named may import all of zero_full
    "_compat": set(),
    "layout": set(),
    "config": {"wording"},
    "optim": {"_compat", "kernels", "precision", "wording"},
    "offload": {"_compat", "comm", "kernels", "precision", "wording"},
    "data": {"_compat"},
    "trial": {"config", "optim", "plan"},
    "check": {"config", "trial", "wording"},
    "migrate": {"check", "config", "engine", "optim"},
    "launch": {"_compat", "comm"},
    "stopwatch": {"wording"},
    "kernels": set(),
    "trees": set(),
    "wording": set(),
    "comm": {"_compat", "kernels", "wording"},
    "precision": {"_compat", "kernels"},
    "shard": {"_compat", "comm", "kernels", "layout", "offload", "optim", "trees", "precision", "wording"},
    "construct": {"_compat", "comm", "trees", "shard"},
    "checkpoint": {"_compat", "comm", "layout", "precision", "trees", "shard", "wording"},
    "deepspeed_queries": {"comm", "config", "precision", "shard"},
    "calls": {"trees", "shard"},
    "given": {"comm", "construct", "shard", "wording"},
    "ranks": {"_compat", "comm", "wording"},
    "assemble": {  # no configuration: it is typed
        *("calls", "checkpoint", "comm", "construct", "given", "kernels", "offload", "optim", "precision"),
        *("ranks", "shard", "wording"),
    },
    "translate": {"config", "offload", "precision", "shard"},
    "reporting": {"comm", "config", "shard", "stopwatch", "wording"},
    "saving": {"checkpoint", "config", "shard"},
    "stopping": {"checkpoint", "comm", "shard"},
    "flight": {"_compat", "comm", "shard", "wording"},
    "engine": {
        "calls",
        "config",
        "data",
        "deepspeed_queries",
        "flight",
        "trees",
        "precision",
        "reporting",
        "saving",
        "shard",
        "stopping",
        "stopwatch",
    },
    "fit": {"plan", "wording"},
    "plan": {
        "_compat",
        "checkpoint",
        "comm",
        "config",
        "engine",
        "given",
        "kernels",
        "offload",
        "optim",
        "precision",
        "shard",
        "translate",
        "trees",
        "wording",
    },
}
LONG_SIGNATURES = {
    *("initialize", "init_distributed"),  # DeepSpeed's, which scripts call by these names
    *("adam_step", "lamb_norms", "lamb_step"),  # operators take nothing but tensors and numbers
    "adam_step_stochastic",
    *("zero_full.optim.lamb.__init__", "zero_full.optim.muon.__init__"),  # options are what a file may say
    *("zero_full.optim.one_bit_adam.__init__", "zero_full.optim.zero_one_adam.__init__"),
    "zero_full.optim.one_bit_lamb.__init__",
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module this file imports, wherever in the file; `from a import b` gives a.b if that is one."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = ROOT / Path(*f"{node.module}.{alias.name}".split("."))
                is_module = inside.with_suffix(".py").exists() or inside.is_dir()
                found.add(f"{node.module}.{alias.name}" if is_module else str(node.module))
    return frozenset(found)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


MODULES = {name_of(path): path for path in FILES}


@cache
def graph() -> dict[str, set[str]]:
    """Which of our modules each of them imports."""
    return {name: {m for m in imports(path) if m in MODULES} for name, path in MODULES.items()}


def circle_from(module: str, above: tuple[str, ...], done: set[str]) -> str:
    """A circle of imports below a module, if there is one."""
    if module in above:
        return " -> ".join([*above, module])
    if module in done:
        return ""
    done.add(module)
    circles = (circle_from(below, (*above, module), done) for below in sorted(graph()[module]))
    return next(filter(None, circles), "")


def test_no_module_imports_itself_in_a_circle() -> None:
    done: set[str] = set()
    assert not [circle for module in graph() if (circle := circle_from(module, (), done))]


def test_arrows_point_only_where_they_may() -> None:
    wrong = []
    for path in FILES:
        package = path.relative_to(ROOT).parts[0]
        ours = {module.split(".")[0] for module in imports(path)} & {*PACKAGES, "tests"}
        if not ours <= ALLOWED[package] | {package}:
            wrong.append(f"{name_of(path)} may not import {ours - ALLOWED[package] - {package}}")
    assert not wrong


def test_a_room_of_zero_full_imports_only_what_is_below_it() -> None:
    wrong = []
    for room, below_it in ROOMS.items():
        inside = [m for m in MODULES if m == f"zero_full.{room}" or m.startswith(f"zero_full.{room}.")]
        entered = {below.split(".")[1] for m in inside for below in graph()[m] if below.count(".")}
        if not inside:
            wrong.append(f"there is no zero_full.{room}")
        if not entered <= below_it | {room}:
            wrong.append(f"zero_full.{room} may not import {entered - below_it - {room}}")
    assert not wrong


def test_zero_min_imports_only_torch_and_itself() -> None:
    known = {"torch", "zero_min", *sys.stdlib_module_names}
    files = sorted((ROOT / "zero_min").glob("*.py"))
    others = {path.name: {module.split(".")[0] for module in imports(path)} - known for path in files}
    assert others == {path.name: set() for path in files} != {}


def too_long(path: Path) -> Iterator[str]:
    """What is too long about a file and its functions."""
    lines = path.read_text().count("\n")
    limit = 260 if path.parent.name == "zero_min" and "tests" not in path.parts else 400
    if lines > limit:
        yield f"{name_of(path)} has {lines} lines, the limit is {limit}"
    for node in functions(path):
        length = (node.end_lineno or 0) - node.lineno + 1
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        if length > 60:
            yield f"{name_of(path)}, {node.name} has {length} lines"
        known = {node.name, f"{name_of(path)}.{node.name}"} & LONG_SIGNATURES
        if len([a for a in arguments if a.arg != "self"]) > 8 and not known:
            yield f"{name_of(path)}, {node.name} has too many arguments"


def test_files_and_functions_stay_short() -> None:
    assert not [text for path in EVERY_FILE for text in too_long(path)]


def unexplained(path: Path) -> Iterator[str]:
    """What a file does not say of itself and of its functions."""
    if not ast.get_docstring(tree_of(path)):
        yield f"{name_of(path)} does not say what it is"
    for node in functions(path):
        named = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
        bare = [a.arg for a in named if a.annotation is None]
        if bare:
            yield f"{name_of(path)}, {node.name}: {bare} without annotation"
        if node.returns is None:
            yield f"{name_of(path)}, {node.name} does not say what it returns"


def test_every_module_says_what_it_is_and_everything_is_annotated() -> None:
    assert not [text for path in FILES for text in unexplained(path)]


def test_a_class_of_zero_full_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if module.startswith("zero_full."):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not twice


def test_no_memory_is_freed_at_a_time_that_depends_on_the_device() -> None:
    """`record_stream` defers a free until an event has passed, and the peak grows as the host runs ahead."""
    assert not [name for name, path in MODULES.items() if "record_stream" in path.read_text()]


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [path for path in EVERY_FILE if path.stem in ("utils", "helpers", "misc", "common")]


def test_offenders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of offenders is empty, too, if nobody looks: so here are some."""
    assert len(FILES) > 100 and graph()["zero_min.stage2"] >= {"zero_min.stage1"}
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "offender.py"
    many = ", ".join(f"a{number}" for number in range(9))
    path.write_text(f"def f({many}):\n" + "    pass\n" * 60 + "\n" * 340)
    assert [text.partition(" ")[2] for text in too_long(path)] == [
        "has 401 lines, the limit is 400",
        "f has 61 lines",
        "f has too many arguments",
    ]
    assert [text.partition(" ")[2].partition(":")[0] for text in unexplained(path)] == [
        "does not say what it is",
        "f",
        "f does not say what it returns",
    ]
    monkeypatch.setitem(graph(), "a", {"b"})
    monkeypatch.setitem(graph(), "b", {"a"})
    assert circle_from("a", (), set()) == "a -> b -> a"
