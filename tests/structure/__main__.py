"""`python -m tests.structure`: lines per room, and the ten largest files, functions and lists of arguments.

A report and no limit: what belongs together stands together, as long as that takes.
"""

from collections import Counter
from collections.abc import Iterable

from tests.structure.test_structure import FILES, MODULES, functions, name_of, room_of


def show(title: str, rows: Iterable[tuple[int, str]]) -> None:
    """Print the ten largest."""
    print(f"\n{title}")
    for number, name in sorted(rows, reverse=True)[:10]:
        print(f"{number:>7,}  {name}")


def main() -> None:
    """Print the report."""
    lines = {name_of(path): path.read_text().count("\n") for path in FILES}
    rooms = Counter[str]()
    for module in MODULES:
        if module.startswith("zero_full."):
            rooms[room_of(module) or "shard"] += lines[module]
    print(f"lines of zero_full by room, {sum(rooms.values()):,} in all")
    for room, count in rooms.most_common():
        print(f"{count:>7,}  {room}")
    named = [(f"{name_of(path)}.{node.name}", node) for path in FILES for node in functions(path)]
    show("lines of a file", ((count, module) for module, count in lines.items()))
    show("lines of a function", (((n.end_lineno or 0) - n.lineno + 1, name) for name, n in named))
    show(
        "arguments", ((len(n.args.posonlyargs + n.args.args + n.args.kwonlyargs), name) for name, n in named)
    )


if __name__ == "__main__":
    main()
