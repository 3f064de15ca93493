"""The import graph of zero_full's rooms, read from the code and drawn as SVG.

A room is a folder of zero_full, one of the folders in `shard`, or a file beside the folders. An arrow says
"imports". Arrows that follow from others (a imports b, b imports c, so a may import c) are left out of the
drawing, not out of the table.
"""

import ast
import html
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from places import CODE, ROOT, SiteError, relative, shown
from snippets import tree_of
from source_pages import says

PACKAGE = "zero_full"
BOX_HEIGHT, ROW, GAP, MARGIN, CHAR = 34, 74, 22, 12, 8.6
Graph = dict[str, set[str]]


def room_of(module: str) -> str:
    """`zero_full.comm.lane` is in the room `comm`, `zero_full.shard.group.master` in `shard/group`."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2]) if parts[:1] == ["shard"] and len(parts) > 1 else "".join(parts[:1])


def _imports(path: str) -> Iterator[str]:
    package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    inside = package if path.endswith("__init__.py") else package[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                file = ROOT.joinpath(*f"{base}.{alias.name}".split("."))
                yield f"{base}.{alias.name}" if file.with_suffix(".py").exists() or file.is_dir() else base


@cache
def rooms() -> Graph:
    """Every room with the rooms it imports."""
    graph: Graph = {}
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        path = shown(file)
        parts = path.removesuffix(".py").split("/")
        if (len(parts) == 2 and parts[1].startswith("__")) or parts[1:] == ["shard", "__init__"]:
            continue  # the public names and the command line import whatever they need; a list of rooms
        room = room_of(".".join(part for part in parts if part != "__init__"))
        mine = graph.setdefault(room, set())
        mine |= {room_of(m) for m in _imports(path) if m.split(".")[0] == PACKAGE} - {room, ""}
    return graph


def _heights(graph: Graph) -> dict[str, int]:
    """How many arrows the longest way down from each room has."""
    heights: dict[str, int] = {}

    def height(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise SiteError(f"a circle of imports: {' -> '.join([*above, room])}")
        if room not in heights:
            heights[room] = max((1 + height(below, (*above, room)) for below in graph[room]), default=0)
        return heights[room]

    for room in graph:
        height(room, ())
    return heights


def _reaches(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        room = todo.pop()
        if room not in found:
            found.add(room)
            todo += graph[room]
    return found


def needed_arrows(graph: Graph) -> Graph:
    """Without the arrows that follow from others."""
    below = {room: _reaches(graph, room) for room in graph}
    return {
        room: {one for one in ones if not any(one in below[other] for other in ones - {one})}
        for room, ones in graph.items()
    }


def _rows(graph: Graph) -> tuple[list[list[str]], Graph]:
    """Rooms by height, highest first; in a row, each near the middle of what it is connected with.

    An arrow that passes other rows gets a place in each of them, a "room" with a number, so that it goes
    around the rooms there. Returns the rows and the arrows from row to row.
    """
    heights = _heights(graph)
    steps: Graph = {room: set() for room in graph}
    for room in graph:
        for below in graph[room]:
            last = room
            for height in range(heights[room] - 1, heights[below], -1):
                passing = f"{room}>{below}#{height}"
                steps[last].add(passing)
                steps[passing], heights[passing], last = set(), height, passing
            steps[last].add(below)
    rows = [sorted(r for r in steps if heights[r] == h) for h in range(max(heights.values()), -1, -1)]
    for _ in range(12):
        for sweep in (rows, rows[::-1]):
            place = {room: (i + 0.5) / len(row) for row in rows for i, room in enumerate(row)}
            for row in sweep:
                row.sort(key=lambda room: _middle(room, steps, place))
                place |= {room: (i + 0.5) / len(row) for i, room in enumerate(row)}
    return rows, steps


def _middle(room: str, steps: Graph, place: dict[str, float]) -> float:
    near = [place[other] for other, ones in steps.items() if room in ones] + [place[r] for r in steps[room]]
    return sum(near) / len(near) if near else place[room]


def drawing() -> str:
    """The graph as SVG, coloured by the page's style sheet."""
    arrows = needed_arrows(rooms())
    rows, steps = _rows(arrows)
    widths = {room: 10.0 if "#" in room else CHAR * len(room) + 24 for room in steps}
    full = max(sum(widths[r] for r in row) + GAP * len(row) for row in rows) + 2 * MARGIN
    tops = {
        r: (x, MARGIN + number * ROW)
        for number, row in enumerate(rows)
        for r, x in _places(row, widths, full)
    }
    for _ in range(40):
        for number, row in enumerate(rows):
            tops |= {r: (x, MARGIN + number * ROW) for r, x in _pulled(row, steps, tops, widths, full)}
    left = min(x - widths[r] / 2 for r, (x, _) in tops.items()) - MARGIN
    full = max(x + widths[r] / 2 for r, (x, _) in tops.items()) + MARGIN - left
    tops = {room: (x - left, y) for room, (x, y) in tops.items()}
    height = 2 * MARGIN + (len(rows) - 1) * ROW + BOX_HEIGHT
    label = html.escape(_in_words(arrows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full:.0f} {height:.0f}" role="img"'
        f' aria-label="{label}" style="max-width:{full:.0f}px">'
    ]
    parts += [_arrow(tops, steps, start, step) for start in arrows for step in sorted(steps[start])]
    parts += [_box(room, *tops[room], widths[room]) for room in arrows]
    return "\n".join(['<figure class="drawing graph" data-search-exclude>', *parts, "</svg>", "</figure>"])


def _places(row: list[str], widths: dict[str, float], full: float) -> Iterator[tuple[str, float]]:
    """The middles of a row's boxes, evenly spread."""
    gap = (full - 2 * MARGIN - sum(widths[r] for r in row)) / len(row)
    x = MARGIN + gap / 2
    for room in row:
        yield room, x + widths[room] / 2
        x += widths[room] + gap


def _pulled(
    row: list[str], steps: Graph, tops: dict[str, tuple[float, float]], widths: dict[str, float], full: float
) -> Iterator[tuple[str, float]]:
    """The middles of a row's boxes, each as near to what it is connected with as its neighbours allow."""
    wanted = [_middle(room, steps, {r: x for r, (x, _) in tops.items()}) for room in row]
    apart = [(widths[a] + widths[b]) / 2 + GAP for a, b in pairwise(row)]
    right, left = list(wanted), list(wanted)
    right[0] = max(right[0], MARGIN + widths[row[0]] / 2)
    left[-1] = min(left[-1], full - MARGIN - widths[row[-1]] / 2)
    for i, distance in enumerate(apart, 1):
        right[i] = max(right[i], right[i - 1] + distance)
    for i, distance in reversed(list(enumerate(apart))):
        left[i] = min(left[i], left[i + 1] - distance)
    for room, one, other in zip(row, right, left, strict=True):
        yield room, (one + other) / 2


def _arrow(tops: dict[str, tuple[float, float]], steps: Graph, start: str, step: str) -> str:
    """One arrow through all its rows."""
    x, y = tops[start][0], tops[start][1] + BOX_HEIGHT
    path = f"M{x:.0f} {y:.0f}"
    while "#" in step:
        x, y = tops[step][0], tops[step][1] + BOX_HEIGHT / 2
        path += f" L{x:.0f} {y:.0f}"
        (step,) = steps[step]
    x, y = tops[step][0], tops[step][1] - 7
    tip = f"M{x - 4:.0f} {y - 1:.0f} L{x:.0f} {y + 6:.0f} L{x + 4:.0f} {y - 1:.0f} Z"
    return f'<path class="line" d="{path} L{x:.0f} {y:.0f}"/><path class="tip" d="{tip}"/>'


def _box(room: str, x: float, y: float, width: float) -> str:
    kind, size = (
        "room" if (ROOT / PACKAGE / room).is_dir() else "file",
        f'width="{width:.0f}" height="{BOX_HEIGHT}"',
    )
    box = f'<rect class="{kind}" x="{x - width / 2:.0f}" y="{y:.0f}" {size} rx="5"/>'
    return f'{box}<text x="{x:.0f}" y="{y + 22:.0f}" text-anchor="middle">{room}</text>'


def _in_words(arrows: Graph) -> str:
    lines = [f"{room} imports {', '.join(sorted(ones))}" for room, ones in sorted(arrows.items()) if ones]
    return "Import graph of zero_full, arrows that follow from others left out: " + "; ".join(lines)


def table(page: str) -> str:
    """Every room: what it is, and all that it imports."""
    lines = ["| room | what it is | imports |", "|---|---|---|"]
    heights = _heights(rooms())
    for room in sorted(rooms(), key=lambda r: (-heights[r], r)):
        folder = (ROOT / PACKAGE / room).is_dir()
        path = f"{PACKAGE}/{room}/__init__.py" if folder else f"{PACKAGE}/{room}.py"
        link = relative(f"source/{path}.md", page)
        below = ", ".join(f"`{r}`" for r in sorted(rooms()[room])) or "nothing of ours"
        lines.append(f"| [`{room}{'/' if folder else ''}`]({link}) | {says(path)} | {below} |")
    return "\n".join(lines)


assert PACKAGE in CODE  # its files have pages to link to
