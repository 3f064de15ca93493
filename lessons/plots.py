"""Pictures with matplotlib. What a colour means stands in `lessons/colours.py`."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
HATCHES = {"host": "///", "disk": "xxx"}  # in which other memory it waits
INKS = "<style>svg { color: #333 } @media (prefers-color-scheme: dark) { svg { color: #ddd } }</style>"
LANES = {  # what a rank can do in a step: a letter, and the colour of what travels
    "all_reduce": ("A", GRADIENTS),
    "reduce_scatter": ("R", GRADIENTS),
    "all_gather": ("G", PARAMETERS),
    "broadcast": ("B", PARAMETERS),
    "all_to_all": ("X", GRADIENTS),
    "device to host": ("D", GRADIENTS),
    "host to device": ("U", PARAMETERS),
    "disk to host": ("r", OPTIMIZER),
    "host to disk": ("w", OPTIMIZER),
}
RANKS = tuple(zip(SERIES, ("-", "--", "-.", ":"), strict=True))  # a line for each rank


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
    """A figure for a notebook: the last value of a cell is shown, and its `alt` says what is seen."""

    svg: str
    alt: str

    def _repr_html_(self) -> str:
        return f'<figure style="margin: 0">{self.svg}</figure>'

    def save(self, path: Path) -> None:
        """Write an SVG file."""
        path.write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return self.alt


def picture(figure: Figure, alt: str) -> Picture:
    """The figure as an SVG without a background, whose black becomes the reader's own text colour.

    So it can be read in a light notebook and in a dark one. `alt` is what a screen reader says.
    """
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
    return Picture(svg.replace("<svg ", head, 1), alt)


def strips(
    held: Mapping[str, Mapping[str, int]], numel: int, formula: Mapping[str, int] | None = None
) -> Picture:
    """A strip of memory for each row, say a rank: its kinds end to end, in bytes per parameter.

    `formula` gives the bytes a row should hold; a dashed line stands there.
    """
    figure = Figure(figsize=(9, 1.1 + 0.42 * len(held)), layout="constrained")
    plot, labelled, said = figure.subplots(), set[str](), []
    longest = max(sum(kinds.values()) for kinds in held.values()) / numel
    for y, (row, kinds) in enumerate(held.items()):
        right = 0.0
        for kind, nbytes in kinds.items():
            wide, name = nbytes / numel, kind.split()[-1]
            hatch = HATCHES.get(kind.split()[0], "")
            style = {"color": COLOURS[name], "edgecolor": INK, "hatch": hatch, "linewidth": 0.6}
            plot.barh(y, wide, 0.8, left=right, label=_once(labelled, kind), **style)
            if wide > 0.05 * longest:
                centred = {"ha": "center", "va": "center", "color": ink_on(COLOURS[name])}
                box = {"facecolor": COLOURS[name], "edgecolor": "none", "pad": 1.5}  # no hatch behind digits
                plot.text(right + wide / 2, y, f"{wide:.2f}", bbox=box, **centred)
            right += wide
        plot.text(right + 0.015 * longest, y, f"{right:.2f}", va="center", fontweight="bold")
        told = ", ".join(f"{kind} {nbytes / numel:.2f}" for kind, nbytes in kinds.items())
        told += f", together {right:.2f}"
        if formula is not None:
            wanted = formula[row] / numel
            plot.vlines(wanted, y - 0.46, y + 0.46, "black", "dashed", label=_once(labelled, "formula"))
            told += f", the formula says {wanted:.2f}"
        said.append((row, told))
    plot.set_yticks(range(len(held)), list(held))
    plot.invert_yaxis()
    plot.set(xlim=(0, 1.1 * longest), xlabel="bytes per parameter")
    plot.spines[["top", "right"]].set_visible(False)
    lines, names = plot.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda i: names[i] == "formula")  # the line comes last
    legend = [lines[i] for i in order], [names[i] for i in order]
    figure.legend(*legend, frameon=False, ncols=4, loc="outside upper center")
    return picture(figure, f"Strips of memory, in bytes per parameter. {_spoken(said)}")


def lanes(ranks: Sequence[Sequence[Event]], numel: int) -> Picture:
    """What every rank did in one step, from left to right, and the bytes that were live meanwhile."""
    watched = any(event.live for events in ranks for event in events)
    tall, labelled = 0.42 * len(ranks), set[str]()
    figure = Figure(figsize=(9, 0.8 + tall + 1.4 * watched), layout="constrained")
    if watched:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[tall, 1.5])
        _live(below, ranks, numel)
    else:
        below = above = figure.subplots()
    largest = max([event.sent for events in ranks for event in events] + [1])
    wide = 0.9 * min(1, max(map(len, ranks)) / 12)
    named, high_up = -1.0, False
    for rank, events in enumerate(ranks):
        above.axhline(rank + 0.45, color="black", linewidth=0.6)
        for x, event in enumerate(events):
            if event.what not in LANES:
                above.vlines(x, rank - 0.45, rank + 0.45, "black", "dotted")
                if rank == 0:
                    high_up = x - named < 0.1 * len(events) and not high_up  # two names would touch
                    named = x
                    above.text(x, -1.1 if high_up else -0.5, event.what, rotation=30, fontsize="small")
                continue
            letter, colour = LANES[event.what]
            high = 0.35 + 0.5 * event.sent / largest
            name = _once(labelled, f"{letter} {event.what}")
            box = {"color": colour, "edgecolor": INK, "linewidth": 0.5, "label": name}
            above.bar(x, -high, wide, bottom=rank + 0.45, **box)
            if len(events) <= 64:
                above.text(x, rank + 0.4, letter, ha="center", fontsize="small", color=ink_on(colour))
    above.set(ylim=(len(ranks) - 0.5, -1.6), yticks=range(len(ranks)))
    above.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
    above.spines[["top", "right", "left", "bottom"]].set_visible(False)
    above.tick_params(length=0)
    below.set(xlabel="events in their order; a taller box sent more bytes", xticks=[])
    figure.legend(*above.get_legend_handles_labels(), frameon=False, ncols=6, loc="outside upper center")
    said = [(f"rank {rank}", _in_words(events)) for rank, events in enumerate(ranks)]
    return picture(figure, f"A timeline, event by event. {_spoken(said)}")


def _live(plot: Axes, ranks: Sequence[Sequence[Event]], numel: int) -> None:
    """Live bytes at every event, a line for each rank."""
    for rank, events in enumerate(ranks):
        colour, dash = RANKS[rank % len(RANKS)]
        plot.plot([event.live / numel for event in events], dash, color=colour, label=f"rank {rank}")
    plot.set(ylabel="live, bytes\na parameter", ylim=0)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(ncols=4, fontsize="small", frameon=False)


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
DASHES = ("--", ":", "-.", "-")


def beside_formula(plot: Axes, names: tuple[str, str, str], measured: Curves, formula: Curves) -> str:
    """Measured points on the formula's lines; `names` are of the plot and its axes. Returns what is seen."""
    title, x, y = names
    for size, ((name, points), (mark, colour)) in enumerate(zip(measured.items(), MARKS, strict=False)):
        # The first are the largest: they can be seen behind others at the same place.
        style = {"color": colour, "markeredgecolor": INK, "markersize": 12 - 3 * size}
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


def cut(names: Sequence[str], ranks: int) -> Picture:
    """A flat tensor, an element a box with its tensor's name, under it who owns which slice."""
    figure = Figure(figsize=(9, 1.3), layout="constrained")
    plot, size, said = figure.subplots(), len(names) // ranks, []
    for x, name in enumerate(names):
        colour = OWNERS[x // size % len(OWNERS)]
        padding = not name.strip("0 ")
        box = {"color": "none" if padding else colour, "edgecolor": AWAY if padding else INK}
        plot.bar(x, 1, 0.94, linewidth=0.6, hatch="///" if padding else "", **box)
        ink = "black" if padding else ink_on(colour)
        plot.text(x, 0.5, name, ha="center", va="center", color=ink)
    for rank in range(ranks):
        first, last = rank * size, (rank + 1) * size
        plot.text((first + last - 1) / 2, -0.15, f"rank {rank}", ha="center", va="top")
        plot.vlines(last - 0.5, -0.5, 1.1, "black", linewidth=1.5)
        said.append(f"rank {rank} owns {' '.join(names[first:last])}")
    plot.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.5, 1.1))
    plot.axis("off")
    return picture(
        figure, f"A flat tensor of {len(names)} elements, cut for {ranks} ranks: {'; '.join(said)}."
    )


def spans(rows: Mapping[str, Sequence[tuple[int, int]]], moments: Mapping[str, int]) -> Picture:
    """When each row, say a layer, was there: boxes from a start to an end, and named moments."""
    figure = Figure(figsize=(9, 1.1 + 0.4 * len(rows)), layout="constrained")
    plot, said = figure.subplots(), []
    for y, (name, times) in enumerate(rows.items()):
        plot.broken_barh([(a, b - a) for a, b in times], (y - 0.4, 0.8), facecolor=PARAMETERS, edgecolor=INK)
        said.append((name, ", ".join(f"from {a} to {b}" for a, b in times) or "never"))
    for name, at in moments.items():
        plot.axvline(at, linestyle=":", color="black")
        plot.text(at, -0.6, name, ha="center", va="bottom", fontsize="small")
    plot.set_yticks(range(len(rows)), list(rows))
    plot.invert_yaxis()
    plot.set(xlabel="events in their order", xticks=[])
    plot.spines[["top", "right"]].set_visible(False)
    when = ", ".join(f"{name} at {at}" for name, at in moments.items())
    return picture(figure, f"What was whole, and when, counted in events; {when}. {_spoken(said)}")
