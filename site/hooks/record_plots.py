"""Plots of what benchmarks have recorded, drawn when the site is built from a record's line for programs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def _style(name: str) -> dict[str, Any]:
    colour, dash = LINES.get(name) or LINES[name.partition(",")[0]]
    return {"color": colour, "linestyle": dash, "label": name}


def _named(plot: Axes, title: str, x: str, y: str) -> None:
    plot.set(title=title, xlabel=x, ylabel=y)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(fontsize="small")


def losses(record: Record) -> Iterator[Picture]:
    """Every optimizer's mean over the seeds, in a band from the best to the worst one, by size of batch."""
    curves: Mapping[str, Any] = record["curves"]
    for large in (False, True):
        (figure, (plot,)), said = new_figure(1), []
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
        yield picture(figure, f"Validation loss, mean and range of {seeds} seeds. {'; '.join(said)}.")


def sent(record: Record) -> Iterator[Picture]:
    """Bytes per parameter since the first step, by each number of ranks: counted, and the closed form."""
    for ranks, rows in record["counted"].items():
        (figure, (plot,)), said = new_figure(1), []
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
            said.append(f"{name} {counted[-1]:.1f}, closed form {formula[-1]:.1f}")
        plot.set_yscale("log")
        _named(plot, f"{ranks} ranks", "step", "bytes per parameter that a rank has sent")
        steps_of = f"{record['steps']} steps on {ranks} ranks"
        yield picture(figure, f"Bytes per parameter after {steps_of}: {'; '.join(said)}.")


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


def timeline(record: Record) -> Iterator[Picture]:
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
    yield picture(figure, f"From the first millisecond to the last, by what is at work. {'; '.join(said)}.")


def losses_say(record: Record) -> str:
    """Where each ends beside Adam with the same batches, by the means over the seeds."""
    curves = record["curves"]
    ends = {name: mean(one[-1] for one in curve["losses"]) for name, curve in curves.items()}
    told = []
    for name, end in ends.items():
        adam = "Adam, large batch" if name.endswith("large batch") else "Adam"
        if name != adam:
            more = end - ends[adam]
            told.append(f"{name.partition(', large')[0]} {abs(more):.3f} {'higher' if more > 0 else 'lower'}")
    return f"The mean loss of {len(record['seeds'])} seeds ends, beside Adam's: {'; '.join(told)}."


def sent_says(record: Record) -> str:
    """What each sends of Adam's bytes."""
    told = []
    for name in next(iter(record["counted"].values())):
        shares = [sum(rows[name]["sent"]) / sum(rows["Adam"]["sent"]) for rows in record["counted"].values()]
        ends = dict.fromkeys(f"{end:.2f}" for end in (min(shares), max(shares)))
        told += [f"{name} {' to '.join(ends)}"] if name != "Adam" else []
    return f"In parts of the bytes that Adam sends, each sends: {'; '.join(told)}."


SENTENCES: dict[str, Callable[[Record], str]] = {"optimizers": losses_say, "compression_bytes": sent_says}
PLOTS: dict[str, Callable[[Record], Iterator[Picture]]] = {
    "optimizers": losses,
    "compression_bytes": sent,
    "offload_timeline": timeline,
}


def drawn(name: str, lines: Sequence[str]) -> str:
    """The figure of what a benchmark has printed; what it says in short stands above."""
    record = json.loads([line for line in lines if line.startswith("{")][-1])
    drawings = [each.svg.strip() for each in PLOTS[name](record)]
    said = f"{SENTENCES[name](record)}\n\n" if name in SENTENCES else ""
    several = " several" if len(drawings) > 1 else ""
    svg = "\n".join(drawings)
    return f'{said}<figure class="drawing{several}" data-search-exclude>\n{svg}\n</figure>\n'


def render(name: str, page: str) -> str:
    """The plot of one record, as a part of a page."""
    file = ROOT / "site" / "records" / f"{name}.md"
    if name not in PLOTS:
        raise SiteError(f"{page} asks for a plot of {name}; there are {', '.join(PLOTS)}")
    if not file.exists():
        raise SiteError(f"{page} asks for a plot of {file.relative_to(ROOT)}, which does not exist")
    made_from = [file, ROOT / "site" / "hooks" / "record_plots.py", ROOT / "lessons" / "plots.py"]
    return made_once(f"plot-{name}", made_from, partial(drawn, name, file.read_text().splitlines()))
