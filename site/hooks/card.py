"""The picture that is shown where a link to the site is shared: the staircase, with the site's name.

It is drawn from lessons/staircase.svg, which is drawn by code, so the two cannot differ.
"""

import io
import re
from typing import Any
from xml.etree import ElementTree

from places import ROOT, SiteError

FILE = "assets/card.png"
SIZE = (1200, 630)  # pixels, as is usual
DRAWING = ROOT / "lessons" / "staircase.svg"
INK, QUIET, PAPER = "#1c2733", "#8a94a1", "#ffffff"
MARGIN, TOP, FOOT = 60, 130, 100
NUMBERS = ("x", "y", "width", "height", "rx")


def png(title: str, says: str) -> bytes:
    """The picture, as a file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, SIZE[0])
    axes.set_ylim(SIZE[1], 0)  # as in SVG, from above
    axes.text(MARGIN, 96, title, size=40, weight="bold", color=INK, va="center")
    axes.text(MARGIN, SIZE[1] - 62, says, size=21, color=INK, va="center")
    drawing = ElementTree.parse(DRAWING).getroot()
    _, _, width, height = map(float, drawing.attrib["viewBox"].split())
    scale = ((SIZE[0] - 2 * MARGIN) / width, (SIZE[1] - TOP - FOOT) / height)
    for element in drawing:
        _draw(axes, element, *scale)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _draw(axes: Any, element: ElementTree.Element, across: float, down: float) -> None:
    """A rectangle or a text of the drawing; it has nothing else."""
    from matplotlib.patches import FancyBboxPatch

    kind = re.sub(r"{.*}", "", element.tag)
    number = {name: float(value) for name, value in element.attrib.items() if name in NUMBERS}
    if kind == "rect":
        empty = element.get("class") == "empty"
        box = FancyBboxPatch(
            (MARGIN + number["x"] * across, TOP + number["y"] * down),
            number["width"] * across,
            number["height"] * down,
            boxstyle=f"round,pad=0,rounding_size={number['rx'] * across}",
            facecolor="none" if empty else element.attrib["fill"],
            edgecolor=QUIET if empty else "none",
            linestyle=(0, (3, 3)) if empty else "solid",
            linewidth=1.4,
        )
        axes.add_patch(box)
    elif kind == "text":
        side = {"middle": "center", "end": "right"}[element.attrib["text-anchor"]]
        where = (MARGIN + number["x"] * across, TOP + number["y"] * down)
        axes.text(*where, element.text, size=12 * across, color=INK, ha=side, va="baseline")
    elif kind != "style":
        raise SiteError(f"{DRAWING.name} has a {kind}, which nobody draws on the card")
