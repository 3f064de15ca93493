"""Plots of what benchmarks have recorded, drawn when the site is built from a record's line for programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import Any

from made_once import made_once
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from places import ROOT, SiteError

from lessons.colours import (
    AWAY,
    BACKWARD,
    BROWN,
    FORWARD,
    GRADIENTS,
    OLIVE,
    OPTIMIZER,
    PARAMETERS,
    SLATE,
    VIOLET,
)
from lessons.plots import Picture, new_figure, picture

Record = Mapping[str, Any]
LINES = {  # a colour and a dash for each optimizer, the same in all plots
    "Adam": (BROWN, "-"),
    "Muon": (SLATE, "-."),
    "1-bit Adam": (OLIVE, "--"),
    "0/1 Adam": (VIOLET, "-"),
    "0/1 Adam, scaler 64": (VIOLET, ":"),
    "LAMB": (BROWN, "-."),
    "1-bit LAMB": (OLIVE, ":"),
}
OTHERS = {"forward+backward": BACKWARD, "DDP": SLATE, "0/1 Adam, a round in every step": OLIVE}


def _style(name: str) -> dict[str, Any]:
    colour, dash = LINES.get(name) or LINES[name.partition(",")[0]]
    return {"color": colour, "linestyle": dash, "label": name}


def _named(plot: Axes, title: str, x: str, y: str) -> None:
    plot.set(title=title, xlabel=x, ylabel=y)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(fontsize="small")


def losses(record: Record) -> Picture:
    """Every optimizer's mean over the seeds, in a band from the best to the worst one."""
    curves: Mapping[str, Any] = record["curves"]
    figure, plots = new_figure(2)
    said = []
    for plot, large in zip(plots, (False, True), strict=True):
        shown = {name: curve for name, curve in curves.items() if name.endswith("large batch") == large}
        for name, curve in shown.items():
            steps, columns = curve["steps"], list(zip(*curve["losses"], strict=True))
            middle = [mean(column) for column in columns]
            plot.plot(steps, middle, **_style(name))
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            plot.fill_between(steps, low, high, color=_style(name)["color"], alpha=0.2, linewidth=0)
            said.append(f"{name} ends at {middle[-1]:.3f}, its seeds from {low[-1]:.3f} to {high[-1]:.3f}")
        ends = [x for curve in shown.values() for one in curve["losses"] for x in one[len(one) // 4 :]]
        plot.set_ylim(0.97 * min(ends, default=0), 1.03 * max(ends, default=1))
        _named(plot, "large batches" if large else "small batches", "step", "validation loss")
    seeds = len(record["seeds"])
    return picture(figure, f"Validation loss, mean and range of {seeds} seeds. {'; '.join(said)}.")


def sent(record: Record) -> Picture:
    """Bytes per parameter since the first step, by each number of ranks: counted, and the closed form."""
    figure, plots = new_figure(len(record["counted"]))
    said = []
    for plot, (ranks, rows) in zip(plots, record["counted"].items(), strict=True):
        for number, (name, row) in enumerate(rows.items()):
            steps = range(1, len(row["sent"]) + 1)
            counted, formula = (
                [each / row["numel"] for each in accumulate(row[key])] for key in ("sent", "formula")
            )
            plot.plot(steps, counted, linewidth=3, **_style(name))
            dots = {"color": "black", "linestyle": ":", "label": None if number else "closed form"}
            plot.plot(steps, formula, **dots)
            if name == "Adam":
                plot.plot(steps, [x / 2 for x in counted], color=AWAY, label="Adam, all-reduce in fp16")
            said.append(f"{name} on {ranks} ranks {counted[-1]:.1f}, closed form {formula[-1]:.1f}")
        plot.set_yscale("log")
        _named(plot, f"{ranks} ranks", "step", "bytes per parameter that a rank has sent")
    return picture(figure, f"Bytes per parameter after {record['steps']} steps: {'; '.join(said)}.")


def links(record: Record) -> Picture:
    """A step's time by rate, for each number of ranks."""
    tables: Mapping[str, Any] = record["links"]
    worlds = list(dict.fromkeys(where.partition(", ")[0] for where in tables))
    figure, plots = new_figure(len(worlds))
    said = []
    for plot, world in zip(plots, worlds, strict=True):
        rates = [where.partition(", ")[2] for where in tables if where.startswith(world)]
        for place, rate in enumerate(rates):
            medians: Mapping[str, float] = tables[f"{world}, {rate}"]["seconds"]
            wide = 0.85 / len(medians)
            for bar, (row, seconds) in enumerate(medians.items()):
                label = row if place == 0 else None
                plot.bar(
                    place + wide * (bar - len(medians) / 2 + 0.5),
                    1e3 * seconds,
                    wide,
                    color=OTHERS.get(row) or _style(row)["color"],
                    label=label,
                )
            told = ", ".join(f"{row} {1e3 * seconds:.0f}" for row, seconds in medians.items())
            said.append(f"{world}, {rate}: {told}")
        plot.set_xticks(range(len(rates)), rates)
        plot.set_yscale("log")
        low, high = plot.get_ylim()
        plot.set_ylim(low, 12 * high)  # the legend has several lines
        _named(plot, world, "link", "a step, ms")
    return picture(figure, f"Milliseconds a step. {'; '.join(said)}.")


WORK = {  # what a rank and its device do in a step with offload: a lane and a colour
    "backward": ("device", BACKWARD),
    "forward": ("device", FORWARD),
    "copies down": ("copies down", GRADIENTS),
    "sum of squares": ("squares, host", GRADIENTS),
    "early step": ("early steps, host", OPTIMIZER),
    "step": ("step, host", OPTIMIZER),
    "copies up": ("copies up", PARAMETERS),
    "read": ("file", OPTIMIZER),
    "write": ("file", AWAY),
}


def timeline(record: Record) -> Picture:
    """One lane below the other for all that works at the same time."""
    rows: Mapping[str, Sequence[Any]] = record["events"]
    figure = Figure(figsize=(9.6, 2.5 * len(rows)), layout="constrained")
    plots = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    said = []
    for plot, (name, events) in zip(plots, rows.items(), strict=True):
        lanes = list(
            dict.fromkeys(lane for what, (lane, _) in WORK.items() if what in {e[0] for e in events})
        )
        labelled: set[str] = set()
        for what, begin, end in events:
            lane, colour = WORK[what]
            label = None if what in labelled or what == lane else what
            labelled.add(what)
            bar = {"color": colour, "label": label, "height": 0.7, "linewidth": 0}
            plot.barh(lanes.index(lane), max(end - begin, 0.4), left=begin, **bar)
        plot.set_yticks(range(len(lanes)), lanes)
        plot.invert_yaxis()
        _named(plot, name, "ms" if plot is plots[-1] else "", "")
        spans = {w: [e for e in events if e[0] == w] for w in WORK if w in labelled}
        told = (f"{w} {each[0][1]:.0f} to {max(e[2] for e in each):.0f}" for w, each in spans.items())
        said.append(f"{name}: {', '.join(told)}")
    return picture(figure, f"From the first millisecond to the last, by what is at work. {'; '.join(said)}.")


PLOTS: dict[str, Callable[[Record], Picture]] = {
    "optimizers": losses,
    "compression_bytes": sent,
    "compression_link": links,
    "offload_timeline": timeline,
}


def drawn(name: str, lines: Sequence[str]) -> str:
    """The figure of what a benchmark has printed."""
    found = [line for line in lines if line.startswith("{")]
    svg = PLOTS[name](json.loads(found[-1])).svg.strip()
    return f'<figure class="drawing" data-search-exclude>\n{svg}\n</figure>\n'


def render(name: str, page: str) -> str:
    """The plot of one record, as a part of a page."""
    file = ROOT / "site" / "records" / f"{name}.md"
    if name not in PLOTS:
        raise SiteError(f"{page} asks for a plot of {name}; there are {', '.join(PLOTS)}")
    if not file.exists():
        raise SiteError(f"{page} asks for a plot of {file.relative_to(ROOT)}, which does not exist")
    made_from = [file, ROOT / "site" / "hooks" / "record_plots.py", ROOT / "lessons" / "plots.py"]
    return made_once(f"plot-{name}", made_from, partial(drawn, name, file.read_text().splitlines()))
