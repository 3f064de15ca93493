"""Drawings of ranks as SVG, made by code so that the text and the picture cannot drift apart."""

from collections.abc import Sequence
from dataclasses import dataclass

RANKS = 4
COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
CELL, GAP, LEFT, TOP, ROW = 150, 24, 120, 46, 42

STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #333 }
.empty { fill: none; stroke: #999; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
</style>"""


@dataclass(frozen=True)
class Strip:
    """One row of the drawing: what it is, and whether each rank holds all of it or its quarter."""

    kind: str
    sharded: bool
    label: str = ""


def ranks(strips: Sequence[Strip], title: str) -> str:
    """Four ranks side by side; a filled quarter is held, an outlined one is another rank's."""
    width, height = LEFT + RANKS * (CELL + GAP), TOP + ROW * len(strips) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{title}">',
        STYLE,
    ]
    for rank in range(RANKS):
        x = LEFT + rank * (CELL + GAP)
        parts.append(f'<text x="{x + CELL // 2}" y="26" text-anchor="middle">rank {rank}</text>')
    for line, strip in enumerate(strips):
        y = TOP + line * ROW
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end">{strip.label or strip.kind}</text>'
        )
        for rank in range(RANKS):
            for quarter in range(RANKS):
                x = LEFT + rank * (CELL + GAP) + quarter * (CELL // RANKS)
                box = f'x="{x + 1}" y="{y}" width="{CELL // RANKS - 3}" height="28" rx="3"'
                mine = not strip.sharded or quarter == rank
                fill = f'fill="{COLOURS[strip.kind]}"' if mine else 'class="empty"'
                parts.append(f"<rect {box} {fill}/>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def stage(number: int) -> str:
    """Who holds what between two steps of this ZeRO stage."""
    strips = [
        Strip("parameters", number >= 3),
        Strip("gradients", number >= 2),
        Strip("optimizer", number >= 1),
    ]
    return ranks(strips, f"What each of four ranks holds at ZeRO stage {number}")
