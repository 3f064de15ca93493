"""The shape of the code: who imports whom, and that public names are explained."""

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
ROOMS = (  # of zero_full, from top to bottom: a file imports from its own room and from those further down
    {"__main__"},
    {"commands"},
    {"early_checks"},
    {"examples"},  # they use what a user uses: `zero_full` itself
    {"integrations"},  # of other libraries; ordinary runs import nothing of it
    {"migrate"},
    {"check", "fit", "measure"},
    {"initialization"},
    {"plan"},
    {"assemble"},
    {"pipeline"},
    {"engine"},
    {"generation"},  # ordinary runs import nothing of it
    {"checkpoint", "flight", "start"},
    {"shard.access"},
    {"shard.step"},
    {"construct", "shard.contents"},
    {"shard.deal"},
    {"shard.guards", "shard.passes"},
    {"shard.group"},
    {"settings"},
    {"offload", "optim"},
    {"comm", "config", "doctor", "precision"},
    {"arguments", "progress"},
    {"_compat", "errors", "formatting", "interrupt", "kernels", "layout", "lazy_names", "nested"},
    {"cpus", "threads"},
    {"control_groups", "direct_io", "freed_memory"},
)
KNOWS_NOTHING_OF = {  # what stands further down and is another matter nevertheless
    "assemble": {"config"},  # it is typed
    "shard": {"config"},
    "config": {"comm", "_compat", "kernels"},  # no torch: a configuration is checked on any machine
    "doctor": {"comm", "_compat", "config"},  # nor where torch is broken
}
LONG_FILES = {
    *("zero_full.engine.engine", "zero_full.shard.step.optimizer", "zero_full.shard.passes.reduce"),
    "tests.zero_full.test_unfinished",
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


def room_of(module: str) -> str:
    """The room of a module of zero_full; "" for the package itself, and for a map of rooms."""
    parts = module.split(".")[1:]
    if parts[:1] == ["shard"]:
        return ".".join(parts[:2]) if len(parts) > 1 else ""
    return parts[0] if parts else ""


def upward(of: dict[str, set[str]]) -> Iterator[str]:
    """The imports from a room into one that does not stand further down, or that it knows nothing of."""
    level = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    for module, below in sorted(of.items()):
        if not module.startswith("zero_full.") or not (room := room_of(module)):
            continue
        barred = KNOWS_NOTHING_OF.get(room, KNOWS_NOTHING_OF.get(room.split(".")[0], set()))
        for other in sorted(below):
            entered = room_of(other)
            if entered and entered != room and (level[entered] <= level[room] or entered in barred):
                yield f"{module} may not import {other}"


def test_a_file_of_zero_full_imports_only_what_is_below_its_room() -> None:
    rooms = {room for rooms in ROOMS for room in rooms}
    assert rooms == {room_of(m) for m in MODULES if m.startswith("zero_full.")} - {""}
    assert not [*upward(graph())]


def test_zero_min_imports_only_torch_and_itself() -> None:
    known = {"torch", "zero_min", *sys.stdlib_module_names}
    files = sorted((ROOT / "zero_min").glob("*.py"))
    others = {path.name: {module.split(".")[0] for module in imports(path)} - known for path in files}
    assert others == {path.name: set() for path in files} != {}


def test_a_file_of_zero_min_can_be_read_in_one_sitting() -> None:
    lines = {path.name: path.read_text().count("\n") for path in (ROOT / "zero_min").glob("*.py")}
    assert lines and not {name: count for name, count in lines.items() if count > 260}


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


STARTS_THREADS = {
    *("Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread", "start_joinable_thread"),
    *("to_thread", "run_in_executor"),
}
WITHOUT_DEVICE = {"zero_full.kernels.builder"}  # its threads wait for compilers, and it must not import torch


def starts_of_threads(path: Path) -> Iterator[str]:
    """Calls, subclasses and aliases by which a file may start a thread: see `zero_full/threads.py`."""
    for node in ast.walk(tree_of(path)):
        used: list[ast.expr] = []
        if isinstance(node, ast.Call):
            used = [node.func]
        elif isinstance(node, ast.ClassDef):
            used = node.bases
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            renamed = [alias.name.split(".")[-1] for alias in node.names if alias.asname]
            used = [ast.Name(name) for name in renamed]
        for each in used:
            if (name := ast.unparse(each).split(".")[-1]) in STARTS_THREADS:
                yield f"{name_of(path)}: {name}"


def test_every_thread_of_zero_full_is_made_by_the_helper_that_sets_its_device() -> None:
    allowed = WITHOUT_DEVICE | {"zero_full.threads"}
    files = {name: path for name, path in MODULES.items() if name.startswith("zero_full.")}
    found = {name: [*starts_of_threads(path)] for name, path in files.items()}
    assert not [text for name in files.keys() - allowed for text in found[name]]
    assert all(found[name] for name in allowed)  # the search finds those that are there


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [path for path in EVERY_FILE if path.stem in ("utils", "helpers", "misc", "common")]


def test_offenders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of offenders is empty, too, if nobody looks: so here are some."""
    assert len(FILES) > 100 and graph()["zero_min.stage2"] >= {"zero_min.stage1"}
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "offender.py"
    path.write_text("def f(a, b):\n    pass\n")
    assert [text.partition(" ")[2].partition(":")[0] for text in unexplained(path)] == [
        "does not say what it is",
        "f",
        "f does not say what it returns",
    ]
    path.with_name("threads.py").write_text(
        "import threading\nfrom threading import Thread as T\nfrom concurrent import futures\n"
        "threading.Timer(1, f)\nfutures.ThreadPoolExecutor()\nclass A(threading.Thread): ...\n"
    )
    names = [text.partition(": ")[2] for text in starts_of_threads(path.with_name("threads.py"))]
    assert sorted(names) == ["Thread", "Thread", "ThreadPoolExecutor", "Timer"]
    monkeypatch.setitem(graph(), "a", {"b"})
    monkeypatch.setitem(graph(), "b", {"a"})
    assert circle_from("a", (), set()) == "a -> b -> a"
    of = {"zero_full.comm.a": {"zero_full.shard.group.b"}, "zero_full.shard.step.c": {"zero_full.config.d"}}
    assert len([*upward(of)]) == 2 and not [*upward({"zero_full.shard.step.c": {"zero_full.comm.a"}})]
