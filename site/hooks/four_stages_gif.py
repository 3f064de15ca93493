"""Four stages on one clock as a GIF: for README, for talks, and for the home page without JavaScript.

`python site/hooks/four_stages_gif.py`, or `make weave`, draws it. What it was drawn from stands in its
comment, and a test compares that with a new recording.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it runs by itself

import four_stages
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image, ImageColor
from places import DOCS, ROOT

from lessons.colours import INK, MEANINGS, PAPER

FILE = ROOT / DOCS / "assets" / "four_stages.gif"
TITLE = "One training step, four stages of ZeRO"
BELOW = "what one of four workers holds and has sent, in bytes per parameter"
WIDTH, HEIGHT, TOP, FLOOR, LEFT, GAP = 720, 452, 152, 330, 30, 18
PANEL = (WIDTH - LEFT - 10 - 3 * GAP) / 4
METER = 0.28 * PANEL
PACE, REST = 380, 3500  # milliseconds: a moment, and the last
COLOURS = {kind: MEANINGS["parameters" if kind == "gathered" else kind] for kind in four_stages.KINDS}
LINE, VEIL = "#c9ced6", 0.84
LETTERS = "#4d5562"  # of what is said beside
SIZES = {"font.size": 11, "font.family": "DejaVu Sans", "hatch.linewidth": 2}
Record = Mapping[str, Any]


def digest(record: Record) -> str:
    """What the picture was drawn from."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def frame(record: Record, place: int) -> Image.Image:
    """One moment. Lengths are pixels, from the upper left corner."""
    with rc_context(SIZES):
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=PAPER)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.set_axis_off()
        axes.text(10, 26, TITLE, size=16, weight="bold")
        axes.text(10, 48, BELOW, size=11, color=LETTERS)
        axes.text(10, 82, record["clock"][place]["title"], size=14, weight="bold")
        most = max(stage[-1]["most"] for stage in record["stages"])
        for level in range(0, 17, 4):
            y = FLOOR - (FLOOR - TOP) * level * record["numel"] / most
            axes.plot([LEFT, WIDTH - 10], [y, y], color=LINE, linewidth=0.8, zorder=0)
            axes.text(LEFT - 5, y, str(level), ha="right", va="center", size=9.5, color=LETTERS)
        for number, stage in enumerate(record["stages"]):
            axes.text(LEFT + number * (PANEL + GAP), 106, f"stage {number}", weight="bold")
            axes.text(LEFT + number * (PANEL + GAP), 123, record["cut"][number], color=LETTERS)
            _strip(axes, stage, place, LEFT + number * (PANEL + GAP), (most, record["numel"]))
        _legend(axes, record["kinds"])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.frombuffer("RGBA", (WIDTH, HEIGHT), canvas.buffer_rgba()).convert("RGB")


def _style(kind: str) -> dict[str, Any]:
    hatch = "////" if kind == "gathered" else ""
    return {"facecolor": COLOURS[kind], "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}


def _strip(axes: Axes, stage: Sequence[Record], place: int, x: float, scale: tuple[float, int]) -> None:
    """A bar of what is there now, the whole step beside it, and a veil over what is still to come."""
    most, numel = scale
    start, right, moment = x + METER + 4, x + PANEL, stage[place]
    step = (right - start) / len(stage)
    edges = [start + step * at for at in range(len(stage) + 1)]

    def y(nbytes: float) -> float:
        return FLOOR - (FLOOR - TOP) * nbytes / most

    under, low = [0] * len(stage), 0
    for kind in four_stages.KINDS:
        over = [before + each["bytes"][kind] for before, each in zip(under, stage, strict=True)]
        between = ([y(each) for each in (*ends, ends[-1])] for ends in (under, over))
        axes.fill_between(edges, *between, step="post", **_style(kind))
        high = low + moment["bytes"][kind]
        axes.add_patch(Rectangle((x, y(high)), METER, y(low) - y(high), **_style(kind)))
        under, low = over, high
    now = edges[place + 1]
    axes.add_patch(Rectangle((now, TOP - 6), right - now + 1, FLOOR - TOP + 6, color=PAPER, alpha=VEIL, lw=0))
    axes.plot([now, now], [TOP - 6, FLOOR], color=INK, linewidth=1.2)
    axes.plot([x, right], [y(moment["most"])] * 2, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    said = axes.text(right, y(moment["most"]) - 4, f"most {moment['most'] / numel:.1f}", ha="right")
    said.set_path_effects([withStroke(linewidth=2.5, foreground=PAPER)])
    axes.text(x, FLOOR + 20, f"now {low / numel:.1f}", weight="bold")
    axes.text(x, FLOOR + 38, f"sent {moment['sent'] / numel:.1f}")
    axes.text(x, FLOOR + 56, moment["does"], color=LETTERS)


def _legend(axes: Axes, kinds: Mapping[str, str]) -> None:
    places = [(10, 410), (160, 410), (10, 434), (320, 410), (320, 434)]
    for (kind, name), (x, y) in zip(kinds.items(), places, strict=True):
        axes.add_patch(Rectangle((x, y - 10), 16, 12, **_style(kind)))
        axes.text(x + 22, y, name, size=10.5)


def drawn(record: Record) -> list[Image.Image]:
    """All moments, in one set of colours."""
    frames = [frame(record, place) for place in range(len(record["clock"]))]
    colours = frames[len(frames) // 2].quantize(64, dither=Image.Dither.NONE)
    table, paper = colours.getpalette() or [], colours.getpixel((0, 0))
    table[3 * paper : 3 * paper + 3] = ImageColor.getrgb(PAPER)  # not a mean of what is nearly white
    colours.putpalette(table)
    return [each.quantize(palette=colours, dither=Image.Dither.NONE) for each in frames]


def main() -> None:
    """Draw it anew."""
    record = four_stages.recorded()
    first, *others = drawn(record)
    times = [PACE] * len(others) + [REST]
    first.save(FILE, save_all=True, append_images=others, duration=times, loop=0, comment=digest(record))
    print(f"{FILE.relative_to(ROOT)}: {len(times)} moments, {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
