"""Pictures with matplotlib. The colours are Okabe and Ito's, told apart by colour-blind readers too."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lessons.bill import KINDS, Bill, on_device
from lessons.registry import ROOT

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
COLOURS = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN}
AWAY = "#999999"  # what waits on the host


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
                left.bar(place, nbytes / numel, wide * 0.92, bottom=top, label=_once(labelled, kind), **style)
                top += nbytes / numel
            left.text(place, top + 0.15, f"rank {rank}", ha="center", fontsize=6)
        formula = on_device(bill.formula_held) / numel
        left.hlines(formula, x - 0.46, x + 0.46, "black", "dashed", label=_once(labelled, "formula"))
        left.text(x, top + 1.0, f"{bill.held / numel:.2f}", ha="center", fontweight="bold")
        sent = bill.sent / world / numel
        right.bar(x, sent, 0.6, color=PINK)
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


def save(figure: Figure, step: int) -> Path:
    """Write the figure where build products go, and say where that is."""
    path = ROOT / "build" / "lessons" / f"step{step}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"plot saved to {path.relative_to(ROOT)}")
    return path
