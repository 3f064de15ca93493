"""Drawings of ranks as SVG, made by code so that the text and the picture cannot drift apart."""

from collections.abc import Callable, Sequence

RANKS = 4
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
CELL, GAP, LEFT, TOP, ROW = 150, 24, 120, 46, 42

STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #333 }
.empty { fill: none; stroke: #999; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""


SHARDED_SINCE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the first stage that cuts it


def _quarters(x: int, y: int, kind: str, rank: int, sharded: bool) -> list[str]:
    """Four boxes: filled where `rank` holds that quarter, outlined where another rank does."""
    boxes = []
    for quarter in range(RANKS):
        mine = not sharded or quarter == rank
        fill = f'fill="{COLOURS[kind]}"' if mine else 'class="empty"'
        left = x + quarter * (CELL // RANKS) + 1
        boxes.append(f'<rect x="{left}" y="{y}" width="{CELL // RANKS - 3}" height="28" rx="3" {fill}/>')
    return boxes


def _drawing(columns: Sequence[str], title: str, quarters: Callable[[int, str], tuple[int, bool]]) -> str:
    """A table of quarters; `quarters(column, kind)` says whose rank it is and whether the kind is cut."""
    width, height = LEFT + len(columns) * (CELL + GAP), TOP + ROW * len(SHARDED_SINCE) + 6
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">', STYLE]
    for column, name in enumerate(columns):
        middle = LEFT + column * (CELL + GAP) + CELL // 2
        parts.append(f'<text x="{middle}" y="26" text-anchor="middle">{name}</text>')
    for line, kind in enumerate(SHARDED_SINCE):
        y = TOP + line * ROW
        parts.append(f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end">{kind}</text>')
        for column in range(len(columns)):
            rank, sharded = quarters(column, kind)
            parts += _quarters(LEFT + column * (CELL + GAP), y, kind, rank, sharded)
    return "\n".join([*parts, "</svg>"]) + "\n"


def stage(number: int) -> str:
    """Who of four ranks holds what between two steps of this ZeRO stage."""
    return _drawing(
        [f"rank {rank}" for rank in range(RANKS)],
        f"What each of four ranks holds at ZeRO stage {number}",
        lambda rank, kind: (rank, number >= SHARDED_SINCE[kind]),
    )


def ring() -> str:
    """How four pieces go round a ring of four ranks: how many ranks' numbers each piece holds, where."""
    counts = [[1] * RANKS for _ in range(RANKS)]  # [rank][piece]
    moments = [("start", counts, set[tuple[int, int]]())]
    for round in range(2 * (RANKS - 1)):
        scatters = round < RANKS - 1
        before, counts, came = counts, [list(pieces) for pieces in counts], set()
        for rank in range(RANKS):
            piece = (rank - 2 - round) % RANKS if scatters else (rank - 1 - (round - RANKS + 1)) % RANKS
            left = before[rank - 1][piece]
            counts[rank][piece] = before[rank][piece] + left if scatters else left
            came.add((rank, piece))
        moments.append((f"round {round + 1}", counts, came))
    width, height = LEFT + RANKS * (CELL + GAP), TOP + ROW * len(moments) + 6
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    title = "A piece goes round four ranks: added up on the first way, copied on the second"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">', STYLE]
    for rank in range(RANKS):
        middle = LEFT + rank * (CELL + GAP) + CELL // 2
        parts.append(f'<text x="{middle}" y="26" text-anchor="middle">rank {rank}</text>')
    for line, (name, by_rank, came) in enumerate(moments):
        y = TOP + line * ROW
        parts.append(f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end">{name}</text>')
        for rank, pieces in enumerate(by_rank):
            for piece, count in enumerate(pieces):
                left = LEFT + rank * (CELL + GAP) + piece * (CELL // RANKS) + 1
                parts += _piece(left, y, count, (rank, piece) in came)
    return "\n".join([*parts, "</svg>"]) + "\n"


TINTS = ("#FBEBCB", "#F5D494", "#EDB84E", "#E69F00")  # of gradients: one rank's numbers, ..., everybody's


def _piece(x: int, y: int, count: int, came: bool) -> list[str]:
    """A box with a number; one that has just come from the left neighbour has an edge."""
    edge = ' stroke="#0072B2" stroke-width="3"' if came else ""
    width = CELL // RANKS - 3
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="28" rx="3" fill="{TINTS[count - 1]}"{edge}/>',
        f'<text x="{x + width // 2}" y="{y + 19}" text-anchor="middle" style="fill: #222">{count}</text>',
    ]


def staircase(stages: Sequence[int]) -> str:
    """What rank 0 of four holds at each stage: the whole project in one picture."""
    return _drawing(
        [f"stage {number}" for number in stages],
        "What rank 0 of four ranks holds at each ZeRO stage",
        lambda column, kind: (0, stages[column] >= SHARDED_SINCE[kind]),
    )
