"""The shape of the code: who imports whom, how long things are, and that public names are explained."""

import ast
from collections.abc import Iterator
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
    "optim": {"wording"},
    "data": set(),
    "migrate": {"config", "engine", "optim"},
    "launch": set(),
    "stopwatch": set(),
    "kernels": set(),
    "trees": set(),
    "wording": set(),
    "comm": {"_compat", "kernels"},
    "precision": {"_compat", "kernels"},
    "shard": {"_compat", "comm", "kernels", "layout", "trees", "precision", "wording"},
    "construct": {"_compat", "comm", "trees", "shard"},
    "checkpoint": {"comm", "layout", "trees", "shard", "wording"},
    "deepspeed_queries": {"comm", "config", "precision", "shard"},
    "calls": {"trees", "shard"},
    "engine": {
        "calls",
        "checkpoint",
        "config",
        "data",
        "deepspeed_queries",
        "trees",
        "precision",
        "shard",
        "stopwatch",
    },
}
LONG_SIGNATURES = {
    *("initialize", "init_distributed"),  # DeepSpeed's, which scripts call by these names
    *("adam_step", "lamb_norms", "lamb_step"),  # operators take nothing but tensors and numbers
}

TWO_MEANINGS = {"Place"}  # in `launch` a rank's among ranks, in `shard/access` a parameter's: to become empty


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module this file imports, wherever in the file; `from a import b` gives a.b if that is one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = ROOT / Path(*f"{node.module}.{alias.name}".split("."))
                is_module = inside.with_suffix(".py").exists() or inside.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


MODULES = {name_of(path): path for path in FILES}
GRAPH = {name: {m for m in imports(path) if m in MODULES} for name, path in MODULES.items()}


def test_no_module_imports_itself_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle of imports: {' -> '.join([*above, module])}"
        if module not in done:
            for below in sorted(GRAPH[module]):
                visit(below, (*above, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows_point_only_where_they_may(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {module.split(".")[0] for module in imports(path)} & {*PACKAGES, "tests"}
    allowed = ALLOWED[package] | {package}
    assert ours <= allowed, f"{name_of(path)} may not import {ours - allowed}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_zero_full_imports_only_what_is_below_it(room: str) -> None:
    inside = [m for m in MODULES if m == f"zero_full.{room}" or m.startswith(f"zero_full.{room}.")]
    assert inside, f"there is no zero_full.{room}"
    entered = {below.split(".")[1] for m in inside for below in GRAPH[m] if below.count(".")}
    assert entered <= ROOMS[room] | {room}, (
        f"zero_full.{room} may not import {entered - ROOMS[room] - {room}}"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "zero_min").glob("*.py")), ids=name_of)
def test_zero_min_imports_only_torch_and_itself(path: Path) -> None:
    import sys

    others = {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names)
    assert others <= {"torch", "zero_min"}


@pytest.mark.parametrize("path", EVERY_FILE, ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = path.read_text().count("\n")
    limit = 200 if path.parent.name == "zero_min" and "tests" not in path.parts else 400
    assert lines <= limit, f"{lines} lines, the limit is {limit}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert length <= 60, f"{node.name} has {length} lines"
            short = len([a for a in arguments if a.arg != "self"]) <= 8 or node.name in LONG_SIGNATURES
            assert short, f"{node.name} has too many arguments"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is_and_everything_is_annotated(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name_of(path)} does not say what it is"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        named = [a for a in node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")]
        bare = [a.arg for a in named if a.annotation is None]
        assert not bare, f"{node.name}: {bare} without annotation"
        assert node.returns is not None, f"{node.name} does not say what it returns"


def test_a_class_of_zero_full_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if module.startswith("zero_full."):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert twice.keys() <= TWO_MEANINGS, twice


def test_no_drawer_for_odds_and_ends() -> None:
    assert not [path for path in EVERY_FILE if path.stem in ("utils", "helpers", "misc", "common")]


def test_notebooks_carry_no_outputs() -> None:
    import json

    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and not cell.get("execution_count"), path.name
