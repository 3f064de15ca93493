"""Drawings of ranks as SVG, made by code so that the text and the picture cannot drift apart."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import torch

from lessons.colours import (
    ACTIVATIONS,
    BACKWARD,
    BROWN,
    FORWARD,
    MEANINGS,
    OLIVE,
    PARAMETERS,
    VIOLET,
)
from zero_min.allocator import MIB, Allocator
from zero_min.pipeline import gpipe, one_f_one_b, replay

RANKS = 4
COLOURS = {kind: MEANINGS[kind] for kind in ("parameters", "gradients", "optimizer")}
CELL, GAP, LEFT, TOP, ROW = 60, 10, 96, 46, 42  # so that four columns fit on a phone

STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #333 }
.empty { fill: none; stroke: #999; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""


SHARDED_SINCE = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the first stage that cuts it


def _quarters(x: int, y: int, colour: str, rank: int, sharded: bool) -> list[str]:
    """Four boxes: filled where `rank` holds that quarter, outlined where another rank does."""
    boxes = []
    for quarter in range(RANKS):
        mine = not sharded or quarter == rank
        fill = f'fill="{colour}"' if mine else 'class="empty"'
        left = x + quarter * (CELL // RANKS) + 1
        boxes.append(f'<rect x="{left}" y="{y}" width="{CELL // RANKS - 3}" height="28" rx="3" {fill}/>')
    return boxes


def _drawing(columns: Sequence[str], title: str, quarters: Callable[[int, str], tuple[int, bool]]) -> str:
    """A table of quarters; `quarters(column, kind)` says whose rank it is and whether the kind is cut."""
    width, height = LEFT + len(columns) * (CELL + GAP) - GAP, TOP + ROW * len(SHARDED_SINCE) + 6
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
            parts += _quarters(LEFT + column * (CELL + GAP), y, COLOURS[kind], rank, sharded)
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
    width, height = LEFT + RANKS * (CELL + GAP) - GAP, TOP + ROW * len(moments) + 6
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


# Of gradients: one rank's numbers, ..., everybody's.
TINTS = ("#FBEBCB", "#F5D494", "#EDB84E", COLOURS["gradients"])


def _piece(x: int, y: int, count: int, came: bool) -> list[str]:
    """A box with a number; one that has just come from the left neighbour has an edge."""
    edge = f' stroke="{VIOLET}" stroke-width="3"' if came else ""
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


BITS = {"sign": BROWN, "exponent": OLIVE, "fraction": VIOLET}
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LINE = "#888888"  # seen on a light page and on a dark one
BIT = 20


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    return "\n".join([head, STYLE, *parts, "</svg>"]) + "\n"


def _text(x: int, y: int, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def bits() -> str:
    """Which bits of three kinds of float say what; torch is asked how many there are."""
    parts = []
    for row, (name, dtype) in enumerate(FORMATS.items()):
        info, y = torch.finfo(dtype), 12 + row * ROW
        fraction = round(-torch.tensor(info.eps).log2().item())
        counts = {"sign": 1, "exponent": info.bits - 1 - fraction, "fraction": fraction}
        parts.append(_text(60, y + 19, name, "end"))
        x = 72
        for kind, count in counts.items():
            for _ in range(count):
                parts.append(
                    f'<rect x="{x + 1}" y="{y}" width="{BIT - 2}" height="28" rx="3" fill="{BITS[kind]}"/>'
                )
                x += BIT
        said = f"1 + {counts['exponent']} + {fraction}"
        parts.append(_text(x + 12, y + 19, said, "start"))
    for column, (kind, colour) in enumerate(BITS.items()):
        x, y = 72 + column * 130, 12 + len(FORMATS) * ROW + 8
        parts.append(f'<rect x="{x}" y="{y}" width="18" height="18" rx="3" fill="{colour}"/>')
        parts.append(_text(x + 26, y + 14, kind, "start"))
    return _svg(72 + 32 * BIT + 100, 12 + len(FORMATS) * ROW + 34, "The bits of fp32, bf16 and fp16", parts)


def _strips(x: int, y: int, colour: str, rank: int) -> list[str]:
    """Four boxes on top of each other, of which `rank` has one: a matrix that is cut by its rows."""
    boxes = []
    for quarter in range(RANKS):
        fill = f'fill="{colour}"' if quarter == rank else 'class="empty"'
        boxes.append(f'<rect x="{x + 1}" y="{y + 9 * quarter}" width="{CELL - 3}" height="7" rx="2" {fill}/>')
    return boxes


def tensor_parallel() -> str:
    """What each of four ranks has of one half of a block, from its input to its output."""
    rows: dict[str, Callable[[int, int, int], list[str]]] = {
        "input": lambda x, y, rank: _quarters(x, y, ACTIVATIONS, rank, sharded=False),
        "layer 1": lambda x, y, rank: _quarters(x, y, PARAMETERS, rank, sharded=True),
        "between": lambda x, y, rank: _quarters(x, y, ACTIVATIONS, rank, sharded=True),
        "layer 2": lambda x, y, rank: _strips(x, y - 3, PARAMETERS, rank),
        "output": lambda x, y, rank: _quarters(x, y, ACTIVATIONS, rank, sharded=False),
    }
    parts, right = [], LEFT + RANKS * (CELL + GAP) - GAP
    for rank in range(RANKS):
        parts.append(_text(LEFT + rank * (CELL + GAP) + CELL // 2, 26, f"rank {rank}"))
    line = TOP
    for name, boxes in rows.items():
        if name == "output":
            line += 4
            band = f'x="{LEFT + 2}" y="{line - 4}" width="{right - LEFT - 5}" height="22" rx="11"'
            parts.append(f'<rect {band} fill="none" stroke="{VIOLET}" stroke-width="3"/>')
            parts.append(_text((LEFT + right) // 2, line + 12, "all-reduce: a sum over the ranks"))
            line += ROW - 8
        parts.append(_text(LEFT - 12, line + 19, name, "end"))
        for rank in range(RANKS):
            parts += boxes(LEFT + rank * (CELL + GAP), line, rank)
        line += ROW
    return _svg(right, line + 6, "What each of four ranks has of one half of a block", parts)


TICK = 13  # of a pipeline's drawing: a forward is as wide, a backward twice


def pipeline() -> str:
    """When each of four ranks does the forward and the backward of four micro-batches, in two schedules."""
    parts, y = [], 6
    rights = []
    for name, schedule in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        parts.append(_text(LEFT, y + 14, name, "start"))
        y += 22
        for rank, row in enumerate(replay([schedule(rank, RANKS, RANKS) for rank in range(RANKS)])):
            parts.append(_text(LEFT - 12, y + 17, f"rank {rank}", "end"))
            for box in row:
                x, wide = LEFT + round(box.start * TICK), round((box.end - box.start) * TICK)
                fill = FORWARD if box.what == "F" else BACKWARD
                parts.append(f'<rect x="{x}" y="{y}" width="{wide - 1}" height="24" rx="2" fill="{fill}"/>')
                number = f'x="{x + wide // 2}" y="{y + 17}" text-anchor="middle" style="fill: #222"'
                parts.append(f"<text {number}>{box.micro_batch}</text>")
                rights.append(x + wide)
            y += 28
        y += 10
    return _svg(max(rights) + 4, y, "What each of four ranks does when, with GPipe and with 1F1B", parts)


def activations() -> str:
    """What each of four ranks has in the middle of a step at stage 3, and what recomputation leaves of it."""
    rows: dict[str, Callable[[int, int, int], list[str]]] = {
        kind: lambda x, y, rank, kind=kind: _quarters(x, y, COLOURS[kind], rank, sharded=True)
        for kind in SHARDED_SINCE
    }
    rows["activations"] = lambda x, y, rank: _quarters(x, y, ACTIVATIONS, rank, sharded=False)
    rows["recomputed"] = lambda x, y, rank: _inputs(x, y)
    parts, right = [], LEFT + RANKS * (CELL + GAP) - GAP
    for rank in range(RANKS):
        parts.append(_text(LEFT + rank * (CELL + GAP) + CELL // 2, 26, f"rank {rank}"))
    for line, (name, boxes) in enumerate(rows.items()):
        y = TOP + line * ROW
        parts.append(_text(LEFT - 12, y + 19, name, "end"))
        for rank in range(RANKS):
            parts += boxes(LEFT + rank * (CELL + GAP), y, rank)
    title = "What each of four ranks has in the middle of a step at stage 3"
    return _svg(right, TOP + len(rows) * ROW + 6, title, parts)


def _inputs(x: int, y: int) -> list[str]:
    """Four layers, of which the inputs are there; the activations of the last one have been made again."""
    boxes = []
    for layer in range(RANKS):
        left, wide = x + layer * (CELL // RANKS) + 1, CELL // RANKS - 3
        last = layer == RANKS - 1
        boxes.append(f'<rect x="{left}" y="{y}" width="{wide}" height="28" rx="3" class="empty"/>')
        size = f'width="{wide if last else 3}" height="28" rx="{3 if last else 1}"'
        boxes.append(f'<rect x="{left}" y="{y}" {size} fill="{ACTIVATIONS}"/>')
    return boxes


def segments() -> str:
    """Blocks of a GPU's segments: tensors come, two go, and one more finds no free block large enough."""
    made, rows = Allocator(), list[tuple[str, list[list[tuple[int, bool]]]]]()
    blocks = [made.allocate(size * MIB) for size in (4, 5, 3, 6)]
    rows.append(("four tensors", made.layout()))
    for block in (blocks[1], blocks[3]):
        made.release(block)
    rows.append(("two have gone", made.layout()))
    made.allocate(9 * MIB)
    rows.append(("9 MiB more", made.layout()))
    wide, left, y = 14, LEFT + 36, 6  # pixels a MiB
    parts, right = [], 0
    for name, found in rows:
        parts.append(_text(left - 12, y + 19, name, "end"))
        x = left
        for blocks_of_one in found:
            total = sum(size for size, _ in blocks_of_one) // MIB
            frame = f'x="{x - 2}" y="{y - 2}" width="{total * wide + 3}" height="32" rx="5"'
            parts.append(f'<rect {frame} fill="none" stroke="{LINE}"/>')
            for size, taken in blocks_of_one:
                fill = f'fill="{PARAMETERS}"' if taken else 'class="empty"'
                boxes = f'x="{x}" y="{y}" width="{size // MIB * wide - 2}" height="28" rx="3"'
                parts.append(f"<rect {boxes} {fill}/>")
                colour = ' style="fill: #fff"' if taken else ""
                middle = x + size // MIB * wide // 2
                parts.append(
                    f'<text x="{middle}" y="{y + 19}" text-anchor="middle"{colour}>{size // MIB}</text>'
                )
                x += size // MIB * wide
            right, x = max(right, x), x + 12
        y += ROW
    return _svg(right + 6, y, "Blocks of a GPU's segments, in MiB, after three events", parts)


def _box(x: int, y: int, wide: int, words: str) -> list[str]:
    frame = f'<rect x="{x}" y="{y}" width="{wide}" height="34" rx="6" fill="none" stroke="{LINE}"/>'
    return [frame, _text(x + wide // 2, y + 22, words)]


def _arrow(points: Sequence[tuple[int, int]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    (x0, y0), (x1, y1) = points[-2:]
    right, down = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    wings = [(x1 - 8 * right + 4 * down * side, y1 - 8 * down + 4 * right * side) for side in (1, -1)]
    tip = " ".join(f"{x},{y}" for x, y in [wings[0], (x1, y1), wings[1]])
    return (
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>'
        f'<polygon points="{tip}" fill="{LINE}"/>'
    )


def error_loop() -> str:
    """One bit a value, and the way of the error: round after round."""
    parts = [
        *_box(20, 20, 70, "x"),
        *_box(150, 20, 110, "x + error"),
        *_box(350, 20, 150, "sign and scale"),
        *_box(590, 20, 130, "said, and sent"),
        *_box(350, 120, 150, "wanted - said"),
        *_box(150, 120, 110, "error"),
        _text(305, 30, "wanted"),
        _text(196, 92, "next round", "end"),
        _arrow([(90, 37), (148, 37)]),
        _arrow([(260, 37), (348, 37)]),
        _arrow([(500, 37), (588, 37)]),
        _arrow([(305, 37), (305, 137), (348, 137)]),
        _arrow([(655, 54), (655, 137), (502, 137)]),
        _arrow([(350, 146), (262, 146)]),
        _arrow([(205, 120), (205, 56)]),
    ]
    return _svg(740, 172, "One bit and its error: what is sent now and what comes with the next round", parts)


OF_NO_STAGE: Mapping[int | Fraction, Callable[[], str]] = {
    Fraction(1, 2): ring,
    8: tensor_parallel,
    9: pipeline,
    10: activations,
    11: segments,
}
OF_ONE_LESSON: Mapping[int, Mapping[str, Callable[[], str]]] = {
    4: {"bits.svg": bits},
    6: {"loop.svg": error_loop},
}
