"""What a hand-in changes outside of its tasks, and lines of it that reach outside of the exercise.

A task needs torch, the standard library's tools for computing, and zero_min. A file that imports pytest,
opens files or asks Python about itself may be after the judge and not after the answer: it is not run.
"""

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from lessons.exercise import blank, written
from lessons.registry import Lesson

IMPORTS = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "enum",
    "fractions",
}
IMPORTS |= {
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "pathlib",
    "random",
    "time",
    "torch",
    "typing",
}
IMPORTS |= {"warnings", "zero_min"}
BUILTINS = {
    "open",
    "exec",
    "eval",
    "compile",
    "globals",
    "locals",
    "vars",
    "breakpoint",
    "input",
    "__import__",
}
BUILTINS |= {"__builtins__", "__loader__", "__spec__", "__file__"}
ATTRIBUTES = {
    "os",
    "sys",
    "modules",
    "importlib",
    "builtins",
    "inspect",
    "subprocess",
    "ctypes",
    "gc",
    "load",
}
ATTRIBUTES |= {"read_text", "read_bytes", "write_text", "write_bytes", "glob", "rglob", "iterdir", "f_back"}
DUNDERS = {"__init__", "__name__", "__class__", "__call__", "__len__", "__iter__", "__next__", "__getitem__"}


def reaching(lesson: Lesson, name: str, source: str) -> list[str]:
    """Each line of a hand-in that reaches outside of the exercise, and is not a line of the file as given."""
    (answer,) = [answer for answer, _ in lesson.files if answer.name == name]
    given = {line.strip() for line in blank(answer, lesson.number).splitlines()}
    lines = source.splitlines()
    found = {
        line: what for line, what in reaching_lines(ast.parse(source)) if lines[line - 1].strip() not in given
    }
    return [f"{name}, line {line}: {what}" for line, what in sorted(found.items())]


def reaching_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each line of a program that reaches outside of what computing needs, and what it reaches for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for name in [module] if module else [alias.name for alias in node.names]:
                if name.partition(".")[0] not in IMPORTS:
                    yield node.lineno, f"imports {name}"
            for alias in node.names:
                if alias.name in ATTRIBUTES:
                    yield node.lineno, f"imports {alias.name}"
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.Attribute) and (node.attr in ATTRIBUTES or _is_private(node.attr)):
            yield node.lineno, f"uses .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private(node.value):
            yield node.lineno, f"uses {node.value!r}"  # as in getattr(zero_min, "__path__")


def _is_private(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in DUNDERS


def changed(lesson: Lesson, name: str, source: str) -> list[int]:
    """The lines of a hand-in that are neither as they were given nor in the place of a task's blank."""
    (answer,) = [answer for answer, _ in lesson.files if answer.name == name]
    asked, mine = blank(answer, lesson.number).splitlines(), source.splitlines()
    inside = {line for lines in written(lesson, answer, source).values() for line in lines}
    matcher = difflib.SequenceMatcher(None, asked, mine, autojunk=False)
    new = {
        line for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal" for line in range(low, high)
    }
    return sorted(line + 1 for line in new - inside if mine[line].strip())


def in_words(lesson: Lesson, sources: dict[str, str]) -> str:
    """Where a hand-in differs outside of the tasks; nothing if it does not."""
    places = [(Path(name).name, changed(lesson, name, text)) for name, text in sources.items()]
    return "; ".join(
        f"{name} is changed outside of the tasks: line {', '.join(map(str, lines[:8]))}"
        for name, lines in places
        if lines
    )
