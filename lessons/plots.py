"""Pictures with matplotlib. What a colour means stands in `lessons/colours.py`."""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lessons.bill import KINDS, Bill, on_device, runs
from lessons.colours import (
    AWAY,
    GRADIENTS,
    INK,
    MEANINGS,
    OPTIMIZER,
    OWNERS,
    PARAMETERS,
    SERIES,
    VIOLET,
    ink_on,
)
from lessons.registry import ROOT
from zero_min.ledger import Event

COLOURS = {kind: MEANINGS[kind] for kind in ("parameters", "gradients", "optimizer")}
HATCHES = {"host": "///", "disk": "xxx"}  # what lies there, and what is copied to or from there
INKS = "<style>svg { color: #333 } @media (prefers-color-scheme: dark) { svg { color: #ddd } }</style>"
LANES = {  # what a rank can do in a step: a letter, and the colour of what travels
    "all_reduce": ("A", GRADIENTS),
    "reduce_scatter": ("R", GRADIENTS),
    "all_gather": ("G", PARAMETERS),
    "broadcast": ("B", PARAMETERS),
    "all_to_all": ("X", GRADIENTS),
    "send": ("S", GRADIENTS),
    "device to host": ("D", GRADIENTS),
    "host to device": ("U", PARAMETERS),
    "disk to host": ("r", OPTIMIZER),
    "host to disk": ("w", OPTIMIZER),
}
RANKS = tuple(zip(SERIES, ("-", "--", "-.", ":"), strict=True))  # a line for each rank
LANE = 0.42  # inches of a rank's lane
WIDTH = 9.0  # inches of most pictures
Content = TypeVar("Content")
Reach = tuple[float, ...]


def save_bills(bills: Sequence[Bill], path: Path) -> None:
    """Stacked bars of what each rank holds and bars of what it sends; a dashed line is the formula."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    world, numel = len(bills[0].ranks), bills[0].numel
    wide = 0.8 / world
    labelled: set[str] = set()
    for x, bill in enumerate(bills):
        for rank, measured in enumerate(bill.ranks):
            place, top = x - 0.4 + wide * (rank + 0.5), 0.0
            for kind, nbytes in sorted(measured.held.items(), key=lambda item: item[0] not in KINDS):
                style = {"color": COLOURS[kind]} if kind in KINDS else {"color": "none", "edgecolor": AWAY}
                name = kind if kind in KINDS else "on the host"
                left.bar(place, nbytes / numel, wide * 0.92, bottom=top, label=_once(labelled, name), **style)
                top += nbytes / numel
            left.text(place, top + 0.15, f"rank {rank}", ha="center", fontsize=6)
        formula = on_device(bill.formula_held) / numel
        left.hlines(formula, x - 0.46, x + 0.46, "black", "dashed", label=_once(labelled, "formula"))
        left.text(x, top + 1.0, f"{bill.held / numel:.2f}", ha="center", fontweight="bold")
        sent = bill.sent / world / numel
        right.bar(x, sent, 0.6, color=VIOLET)
        right.hlines(bill.formula_sent / bill.row.steps / world / numel, x - 0.4, x + 0.4, "black", "dashed")
        right.text(x, sent, f"{sent:.2f}", ha="center", va="bottom")
    names = [bill.row.name.replace(", ", "\n") for bill in bills]
    for axes, title in ((left, "held between steps"), (right, "sent in a step")):
        axes.set_xticks(range(len(bills)), names, fontsize=8)
        axes.set_ylabel("bytes per parameter and rank")
        axes.set_title(f"{title}, {world} ranks")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.legend(frameon=False, ncols=6, loc="outside lower center")
    figure.savefig(path, dpi=130)


def _once(labelled: set[str], label: str) -> str | None:
    """The label the first time it is asked for, so that the legend has every entry once."""
    if label in labelled:
        return None
    labelled.add(label)
    return label


def new_figure(plots: int) -> tuple[Figure, list[Axes]]:
    """An empty figure with some plots beside each other, drawn without a screen."""
    figure = Figure(figsize=(4.8 * plots, 3.8), layout="constrained")
    return figure, list(figure.subplots(1, plots, squeeze=False)[0])


def label(plot: Axes, title: str, x: str, y: str) -> None:
    """Name a plot and its axes; bytes start at zero, and the legend has room above them."""
    plot.set(title=title, xlabel=x, ylabel=y)
    plot.set_ylim(0, 1.3 * plot.get_ylim()[1])
    plot.legend(fontsize="small")


def save(figure: Figure, step: int | str) -> Path:
    """Write the figure where build products go, and say where that is. As SVG, too, for the lesson's text."""
    path = ROOT / "build" / "lessons" / f"step{step}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    drawn = picture(figure, f"what lesson {step} measures").svg.replace(">", f">\n{INKS}", 1)
    path.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    print(f"plot saved to {path.relative_to(ROOT)}")
    return path


@dataclass(frozen=True)
class Picture:
    """A figure for a notebook: the last value of a cell is shown, and its `alt` says what is seen.

    `reach` says how far its axes go, and `redraw` draws it again with axes that go further. A slider uses
    both, so that all its pictures have one scale.
    """

    svg: str
    alt: str
    reach: Reach = field(default=(), compare=False)
    redraw: Callable[[Reach], "Picture"] | None = field(default=None, compare=False)

    def _repr_html_(self) -> str:
        # On a phone it scrolls: its letters keep a size that can be read.
        inside = f'<div style="min-width: 600px">{self.svg}</div>'
        return f'<figure style="margin: 0; overflow-x: auto">{inside}</figure>'

    def save(self, path: Path) -> None:
        """Write an SVG file."""
        path.write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return self.alt


def picture(figure: Figure, alt: str) -> Picture:
    """The figure as an SVG without a background, whose black becomes the reader's own text colour.

    So it can be read in a light notebook and in a dark one. `alt` is what a screen reader says.
    """

    def again(reach: Reach) -> Picture:
        limits = iter(reach)
        for plot in figure.axes:
            for move in (plot.set_xlim, plot.set_ylim):
                low, high = -next(limits), next(limits)
                move(low, high)
        return picture(figure, alt)

    ends = [end for plot in figure.axes for end in (*plot.get_xlim(), *plot.get_ylim())]
    reach = tuple(end if place % 2 else -end for place, end in enumerate(ends))
    return Picture(_svg_of(figure, alt), alt, reach, again)


def _svg_of(figure: Figure, alt: str) -> str:
    for plot in figure.axes:
        legend = plot.get_legend()
        if legend is not None:
            legend.get_frame().set(facecolor="none", edgecolor="none")
    written = io.StringIO()
    # Names inside an SVG are made from the salt: two pictures on one page must not share them.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg).replace("#000000", "currentColor")
    svg = re.sub(r"\s*\n\s*", "\n", svg)  # an empty line would end the block where this becomes Markdown
    style = "max-width: 100%; height: auto; font-family: sans-serif; stroke-linejoin: round"
    spoken = html.escape(alt, quote=True)
    head = f'<svg role="img" aria-label="{spoken}" fill="currentColor" style="{style}" '
    return svg.replace("<svg ", head, 1)


def _merged(rows: Sequence[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """Neighbouring ranks with equal content as one row, whose name counts them: ranks 0 to 3, x4."""
    merged: list[tuple[str, Content]] = []
    for _, found in groupby(rows, key=lambda row: (re.sub(r"\brank \d+$", "rank", row[0]), row[1])):
        alike = list(found)
        name, content = alike[0]
        if len(alike) > 1:
            last = alike[-1][0].rpartition(" ")[2]
            name = f"{name.replace('rank ', 'ranks ')} to {last}, x{len(alike)}"
        merged.append((name, content))
    return merged


def _hatch(words: str) -> str:
    """The hatch of what lies on the disk or the host, or is copied to or from there."""
    return next((HATCHES[place] for place in ("disk", "host") if place in words.split()), "")


def strips(
    held: Mapping[str, Mapping[str, int]],
    numel: int,
    formula: Mapping[str, int] | None = None,
    reach: Reach = (0.0,),
) -> Picture:
    """A strip of memory for each row, say a rank: its kinds end to end, in bytes per parameter.

    `formula` gives the bytes a row should hold; a dashed line stands there. Ranks that hold the same are one
    strip. The axis goes to `reach` at least.
    """
    rows = _merged([(row, (kinds, formula[row] if formula else None)) for row, kinds in held.items()])
    figure = Figure(figsize=(WIDTH, 1.2 + LANE * len(rows)), layout="constrained")
    plot, labelled = figure.subplots(), set[str]()
    longest = max(*(sum(kinds.values()) / numel for kinds in held.values()), *reach)
    for y, (_, (kinds, wanted)) in enumerate(rows):
        right, narrow = 0.0, False
        for kind, nbytes in kinds.items():
            wide, name = nbytes / numel, kind.split()[-1]
            hatch = _hatch(kind)
            style = {"color": COLOURS[name], "edgecolor": INK, "hatch": hatch, "linewidth": 0.6}
            plot.barh(y, wide, 0.8, left=right, label=_once(labelled, kind), **style)
            if wide > 0.05 * longest:
                centred = {"ha": "center", "va": "center", "color": ink_on(COLOURS[name])}
                box = {"facecolor": COLOURS[name], "edgecolor": "none", "pad": 1.5}  # no hatch behind digits
                plot.text(right + wide / 2, y, f"{wide:.2f}", bbox=box, **centred)
            narrow = narrow or 0 < wide <= 0.05 * longest
            right += wide
        total = plot.text(right + 0.015 * longest, y, f"{right:.2f}", va="center", fontweight="bold")
        if narrow:  # a number that has no room in its box stands beside the row
            parts = " + ".join(f"{nbytes / numel:.2f}" for nbytes in kinds.values())
            plot.annotate(f"  = {parts}", (1, 0), xycoords=total, va="bottom")
        if wanted is not None:
            plot.vlines(
                wanted / numel, y - 0.46, y + 0.46, "black", "dashed", label=_once(labelled, "formula")
            )
    plot.set_yticks(range(len(rows)), [name for name, _ in rows])
    plot.invert_yaxis()
    plot.set(xlim=(0, 1.1 * longest), xlabel="bytes per parameter")
    plot.spines[["top", "right"]].set_visible(False)
    lines, names = plot.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: names[i] == "formula")  # the line comes last
    legend = [lines[i] for i in order], [names[i] for i in order]
    figure.legend(*legend, frameon=False, ncols=4, loc="outside upper center")
    alt = f"Strips of memory, in bytes per parameter. {_spoken(_told(held, numel, formula))}"
    again = partial(strips, held, numel, formula)
    return Picture(_svg_of(figure, alt), alt, (longest,), again)


def _told(
    held: Mapping[str, Mapping[str, int]], numel: int, formula: Mapping[str, int] | None
) -> list[tuple[str, str]]:
    said = []
    for row, kinds in held.items():
        told = ", ".join(f"{kind} {nbytes / numel:.2f}" for kind, nbytes in kinds.items())
        told += f", together {sum(kinds.values()) / numel:.2f}"
        if formula is not None:
            told += f", the formula says {formula[row] / numel:.2f}"
        said.append((row, told))
    return said


def lanes(
    ranks: Sequence[Sequence[Event]],
    numel: int,
    carries: Mapping[str, str] | None = None,
    reach: Reach = (1.0, 0.0),
) -> Picture:
    """What every rank did in one step, from left to right, and the bytes that were live meanwhile.

    Ranks that did the same are one lane. `carries` gives a call another colour, where it carries something
    else than usual. The tallest box stands for `reach[0]` bytes at least.
    """
    watched = any(event.live for events in ranks for event in events)
    largest = max([event.sent for events in ranks for event in events] + [reach[0]])
    drawn = [[(e.what, round(e.sent / largest, 2)) for e in events] for events in ranks]
    rows = _merged([(f"rank {rank}", events) for rank, events in enumerate(drawn)])
    tall, labelled = LANE * (len(rows) + 1.1), set[str]()
    figure = Figure(figsize=(WIDTH, 0.7 + tall + 1.4 * watched), layout="constrained")
    live = 0.0
    if watched:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[tall, 1.5])
        live = _live(below, ranks, numel, reach[1])
    else:
        below = above = figure.subplots()
    most = max(map(len, ranks))
    wide = 0.9 * min(1, most / 12)
    with_letters = 0.85 * 72 * WIDTH * wide / most >= 7  # points: the width of a letter and some air
    named, high_up = -1.0, False
    for row, (_, events) in enumerate(rows):
        above.axhline(row + 0.45, color="black", linewidth=0.6)
        for x, (what, part) in enumerate(events):
            if what not in LANES:
                above.vlines(x, row - 0.45, row + 0.45, "black", "dotted")
                if row == 0:
                    high_up = x - named < 0.1 * len(events) and not high_up  # two names would touch
                    named = x
                    above.text(x, -1.1 if high_up else -0.5, what, rotation=30, fontsize="small")
                continue
            letter, colour = LANES[what]
            colour = (carries or {}).get(what, colour)
            hatch = _hatch(what)
            lettered = with_letters and not hatch  # on a hatch a letter cannot be read
            name = _once(labelled, f"{letter} {what}" if lettered else what)
            box = {"color": colour, "edgecolor": INK, "hatch": hatch, "linewidth": 0.5, "label": name}
            above.bar(x, -(0.35 + 0.5 * part), wide, bottom=row + 0.45, **box)
            if lettered:
                style = {"ha": "center", "fontsize": "small", "color": ink_on(colour)}
                above.text(x, row + 0.4, letter, **style)
    above.set(ylim=(len(rows) - 0.5, -1.6), yticks=range(len(rows)))
    above.set_yticklabels([name for name, _ in rows])
    above.spines[["top", "right", "left", "bottom"]].set_visible(False)
    above.tick_params(length=0)
    below.set(xlabel="events in their order; a taller box sent more bytes", xticks=[])
    figure.legend(*above.get_legend_handles_labels(), frameon=False, ncols=6, loc="outside upper center")
    said = [(f"rank {rank}", _in_words(events)) for rank, events in enumerate(ranks)]
    alt = f"A timeline, event by event. {_spoken(said)}"
    return Picture(_svg_of(figure, alt), alt, (largest, live), partial(lanes, ranks, numel, carries))


def _live(plot: Axes, ranks: Sequence[Sequence[Event]], numel: int, reach: float) -> float:
    """Live bytes at every event, a line for all ranks that are alike. Returns how far the axis goes."""
    rows = _merged(
        [(f"rank {rank}", [event.live / numel for event in each]) for rank, each in enumerate(ranks)]
    )
    for row, (name, values) in enumerate(rows):
        colour, dash = RANKS[row % len(RANKS)]
        plot.plot(values, dash, color=colour, label=name)
    highest = max([value for _, values in rows for value in values] + [reach])
    plot.set(ylabel="live, bytes\na parameter", ylim=(0, 1.05 * highest))
    plot.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(ncols=4, fontsize="small", frameon=False)
    return highest


def _in_words(events: Sequence[Event]) -> str:
    """A rank's step as a sentence; neighbours of one kind are counted, in a long step all of a kind."""
    told = [(what, count, sent) for what, count, sent, _ in runs(events)]
    if len(told) > 16:
        kinds = {what: [each for each in told if each[0] == what] for what, _, _ in told}
        told = [(what, sum(x[1] for x in each), sum(x[2] for x in each)) for what, each in kinds.items()]
    return ", ".join(
        what + (f" {count} times" if count > 1 else "") + (f" ({sent:,} bytes)" if sent else "")
        for what, count, sent in told
    )


def _spoken(rows: Sequence[tuple[str, str]]) -> str:
    """Row by row what is seen; a row that is like the one before is only named."""
    lines: list[str] = []
    last = ""
    for name, told in rows:
        lines.append(f"{name}: {told if told != last else 'the same'}")
        last = told
    return "; ".join(lines) + "."


Curves = Mapping[str, Mapping[float, float]]  # name -> x -> y
MARKS = tuple(zip("osv^", SERIES, strict=True))
SIZES = (14, 10, 7, 4.5)  # of marks: the first can be seen behind others at the same place
DASHES = ("--", ":", "-.", "-")


def beside_formula(plot: Axes, names: tuple[str, str, str], measured: Curves, formula: Curves) -> str:
    """Measured points on the formula's lines; `names` are of the plot and its axes. Returns what is seen."""
    title, x, y = names
    for (name, points), (mark, colour), size in zip(measured.items(), MARKS, SIZES, strict=False):
        colour = LANES[name][1] if name in LANES else colour
        style = {"color": colour, "markeredgecolor": INK, "markeredgewidth": 0.6, "markersize": size}
        plot.plot(list(points), list(points.values()), mark, label=name, **style)
    for (name, points), dash in zip(formula.items(), DASHES, strict=False):
        plot.plot(list(points), list(points.values()), dash, color="black", label=f"formula: {name}")
    label(plot, title, x, y)
    plot.set_ylim(0, 1.15 * plot.get_ylim()[1])  # the legend has several lines
    plot.set_xticks(sorted({at for points in measured.values() for at in points}))
    plot.spines[["top", "right"]].set_visible(False)
    said = [
        f"{name}: " + ", ".join(f"{value:.2f} at {at:g}" for at, value in points.items())
        for name, points in (*measured.items(), *((f"formula {n}", p) for n, p in formula.items()))
    ]
    return f"{title}, {y} against {x}. {'; '.join(said)}. "


def cut(names: Sequence[str], ranks: int, reach: Reach = (0.0,)) -> Picture:
    """A flat tensor, an element a box with its tensor's name, under it who owns which slice.

    The axis has room for `reach` elements at least.
    """
    figure = Figure(figsize=(WIDTH, 1.3), layout="constrained")
    plot, size, said = figure.subplots(), len(names) // ranks, []
    longest = max(len(names), *reach)
    for x, name in enumerate(names):
        colour = OWNERS[x // size % len(OWNERS)]
        padding = not name.strip("0 ")
        box = {"color": "none" if padding else colour, "edgecolor": AWAY if padding else INK}
        plot.bar(x, 1, 0.94, linewidth=0.6, linestyle="--" if padding else "-", **box)
        if longest <= 50 or name != names[x - 1] or x % size == 0:  # in narrow boxes once for several
            ink = "black" if padding else ink_on(colour)
            plot.text(x, 0.5, name, ha="center", va="center", color=ink)
    for rank in range(ranks):
        first, last = rank * size, (rank + 1) * size
        plot.text((first + last - 1) / 2, -0.15, f"rank {rank}", ha="center", va="top")
        plot.vlines(last - 0.5, -0.5, 1.1, "black", linewidth=1.5)
        said.append(f"rank {rank} owns {' '.join(names[first:last])}")
    plot.set(xlim=(-0.6, longest - 0.4), ylim=(-0.5, 1.1))
    plot.axis("off")
    alt = f"A flat tensor of {len(names)} elements, cut for {ranks} ranks: {'; '.join(said)}."
    return Picture(_svg_of(figure, alt), alt, (float(longest),), partial(cut, names, ranks))


def spans(
    rows: Mapping[str, Sequence[tuple[int, int]]], moments: Mapping[str, int], reach: Reach = (0.0,)
) -> Picture:
    """When each row, say a layer, was there: boxes from a start to an end, and named moments.

    The axis has room for `reach` events at least.
    """
    figure = Figure(figsize=(WIDTH, 1.1 + 0.4 * len(rows)), layout="constrained")
    plot, said = figure.subplots(), []
    for y, (name, times) in enumerate(rows.items()):
        plot.broken_barh([(a, b - a) for a, b in times], (y - 0.4, 0.8), facecolor=PARAMETERS, edgecolor=INK)
        said.append((name, ", ".join(f"from {a} to {b}" for a, b in times) or "never"))
    for name, at in moments.items():
        plot.axvline(at, linestyle=":", color="black")
        plot.text(at, -0.6, name, ha="center", va="bottom", fontsize="small")
    plot.set_yticks(range(len(rows)), list(rows))
    plot.invert_yaxis()
    longest = max([float(end) for times in rows.values() for _, end in times] + list(reach))
    plot.set(xlabel="events in their order", xticks=[], xlim=(-0.02 * longest, 1.02 * longest))
    plot.spines[["top", "right"]].set_visible(False)
    when = ", ".join(f"{name} at {at}" for name, at in moments.items())
    alt = f"What was whole, and when, counted in events; {when}. {_spoken(said)}"
    return Picture(_svg_of(figure, alt), alt, (longest,), partial(spans, rows, moments))
