"""Pictures with matplotlib. The colours are Okabe and Ito's, told apart by colour-blind readers too."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lessons.bill import KINDS, Bill

COLOURS = {"parameters": "#0072B2", "gradients": "#E69F00", "optimizer": "#009E73"}
SENT = "#CC79A7"


def save_bills(bills: Sequence[Bill], path: Path) -> None:
    """Stacked bars of what each rank holds and bars of what it sends; a dashed line is the formula."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    world, numel = len(bills[0].ranks), bills[0].numel
    wide = 0.8 / world
    for x, bill in enumerate(bills):
        for rank, measured in enumerate(bill.ranks):
            bottom = 0.0
            for kind in KINDS:
                height = measured.held[kind] / numel
                label = kind if x == rank == 0 else None
                place = x - 0.4 + wide * (rank + 0.5)
                left.bar(place, height, wide * 0.92, bottom=bottom, color=COLOURS[kind], label=label)
                bottom += height
            left.text(place, bottom + 0.15, f"rank {rank}", ha="center", fontsize=7)
        formula = sum(bill.formula_held.values()) / numel
        left.hlines(formula, x - 0.46, x + 0.46, "black", "dashed", label="formula" if x == 0 else None)
        left.text(x, formula + 0.75, f"{bill.held / numel:.2f}", ha="center", fontweight="bold")
        right.bar(x, bill.sent / world / numel, 0.6, color=SENT)
        right.hlines(bill.formula_sent / world / numel, x - 0.4, x + 0.4, "black", "dashed")
        right.text(x, bill.sent / world / numel, f"{bill.sent / world / numel:.2f}", ha="center", va="bottom")
    names = [bill.row.name for bill in bills]
    for axes, title in ((left, "held between steps"), (right, "sent in one step")):
        axes.set_xticks(range(len(bills)), names)
        axes.set_ylabel("bytes per parameter and rank")
        axes.set_title(f"{title}, {world} ranks")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.legend(frameon=False, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=130)
