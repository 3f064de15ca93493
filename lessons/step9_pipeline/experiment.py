"""Step 9, measured: the bubble, the activations that wait, the bytes that travel.

Run it with `python -m lessons run 9`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lessons.cells import columns, run_cell
from lessons.colours import BACKWARD, BROWN, FORWARD, INK, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import Pipeline, run_world
from zero_min.comm import Comm
from zero_min.formula import pipeline_bubble, pipeline_kept, pipeline_sent
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.pipeline import Box, Order, bubble, gpipe, one_f_one_b, replay

CONFIG = GPTConfig(context=16, layers=4, width=32)
SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {"GPipe": gpipe, "1F1B": one_f_one_b}
RANKS, ROWS = 4, 16
RANKS_DIFFER = True  # at one time: `watch` goes by messages
SLOWLY = 0.02  # seconds of a forward; a backward takes twice as long


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(9, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(9, "Break it")


def data() -> tuple[Tensor, Tensor]:
    """The batch that all ranks are given."""
    return batch(load_text(), ROWS, CONFIG.context, torch.Generator().manual_seed(0))


class Noted(Pipeline):
    """Writes down in which order it did what."""

    done: Order

    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """As ever, and remember."""
        self.done = []
        return super().run(tokens, targets)

    def forward(self, i: int) -> None:
        """As ever, and remember."""
        super().forward(i)
        self.done.append(("F", i))

    def backward(self, i: int) -> None:
        """As ever, and remember."""
        super().backward(i)
        self.done.append(("B", i))


@dataclass(frozen=True)
class Measured:
    """One rank's batch."""

    loss: float | None
    done: Order
    kept: int  # micro-batches, at most
    peak: int  # bytes of activations, and whatever else was alive at once beside what was there before
    parameters: int
    sent: int


def _one_batch(comm: Comm, schedule: str, micro_batches: int) -> Measured:
    tokens, targets = data()
    trainer = Noted(GPT(CONFIG), comm, micro_batches, SCHEDULES[schedule])
    with comm.ledger.watch():
        loss = trainer.run(tokens, targets)
    trainer.step()
    numel, sent = sum(p.numel() for p in trainer.stage.parameters()), comm.ledger.total_sent()
    return Measured(loss, trainer.done, trainer.most_kept, comm.ledger.peak, numel, sent)


@cache
def measured(schedule: str, micro_batches: int, ranks: int = RANKS) -> list[Measured]:
    """A batch in so many micro-batches."""
    return run_world(_one_batch, ranks, schedule, micro_batches)


def rows_of(schedule: str, micro_batches: int, ranks: int = RANKS) -> list[list[Box]]:
    """What the ranks did, replayed: a backward takes twice as long as a forward."""
    return replay([run.done for run in measured(schedule, micro_batches, ranks)])


def chart(rows: Sequence[Sequence[Box]]) -> str:
    """A row of letters for each rank, one for each unit of time: a forward small, a backward large."""
    lines = []
    for rank, row in enumerate(rows):
        letters = ["."] * round(max(each[-1].end for each in rows))
        for box in row:
            for at in range(round(box.start), round(box.end)):
                letters[at] = chr(ord("a" if box.what == "F" else "A") + box.micro_batch)
        lines.append(f"rank {rank}  {''.join(letters)}")
    return "\n".join(lines)


def charts() -> str:
    """Both schedules with eight micro-batches on four ranks, as letters."""
    return "\n\n".join(f"{name}\n{chart(rows_of(name, 8))}" for name in SCHEDULES)


def bubbles() -> str:
    """The bubble of both schedules as the number of micro-batches grows, beside the formula."""
    table: list[list[object]] = [["micro-batches", *SCHEDULES, "(p-1)/(m+p-1)"]]
    for m in (1, 2, 4, 8, 16):
        found = [f"{bubble(rows_of(name, m)):.1%}" for name in SCHEDULES]
        table.append([m, *found, f"{pipeline_bubble(RANKS, m):.1%}"])
    return columns(table)


def kept() -> str:
    """How many of eight micro-batches each rank keeps at most, beside the formula."""
    table: list[list[object]] = [["", "GPipe keeps", "formula", "1F1B keeps", "formula"]]
    for rank in range(RANKS):
        cells = [measured("GPipe", 8)[rank].kept, pipeline_kept("gpipe", rank, RANKS, 8)]
        cells += [measured("1F1B", 8)[rank].kept, pipeline_kept("1F1B", rank, RANKS, 8)]
        table.append([f"rank {rank}", *cells])
    return columns(table)


def peaks() -> str:
    """The most bytes that were alive at once beside weights and optimizer, messages on their way included."""
    table: list[list[object]] = [["", *SCHEDULES]]
    for rank in range(RANKS):
        table.append([f"rank {rank}", *(f"{measured(name, 8)[rank].peak:,}" for name in SCHEDULES)])
    return columns(table)


def table() -> str:
    """What all ranks send for a batch, beside the formula, and the loss, on 1, 2 and 4 ranks."""
    lines: list[list[object]] = [["ranks", "loss", "parameters of the fullest", "all send", "formula"]]
    for n in (1, 2, 4):
        runs = measured("1F1B", 4, n)
        sent, most = sum(run.sent for run in runs), max(run.parameters for run in runs)
        lines.append([n, f"{runs[-1].loss:.5f}", f"{most:,}", f"{sent:,}", f"{_sent(n):,}"])
    return columns(lines)


def _sent(ranks: int) -> int:
    tied = CONFIG.vocabulary * CONFIG.width
    return pipeline_sent(ranks, ROWS * CONFIG.context, CONFIG.width, tied)


def bill() -> str:
    """What `check` shows at its end: what your file holds, sends and waits, beside the formula."""
    runs = measured("1F1B", 8)
    lines = [f"your pipeline with {RANKS} ranks and 8 micro-batches:"]
    for rank, run in enumerate(runs):
        most = pipeline_kept("1F1B", rank, RANKS, 8)
        lines.append(f"  {f'micro-batches kept by rank {rank}':<34}{run.kept:>12,}   formula {most:>12,}")
    sent = sum(run.sent for run in runs)
    lines.append(f"  {'bytes sent by all for a batch':<34}{sent:>12,}   formula {_sent(RANKS):>12,}")
    for name in SCHEDULES:
        found = f"{bubble(rows_of(name, 8)):.6f}"
        said = f"{pipeline_bubble(RANKS, 8):.6f}"
        lines.append(f"  {f'bubble of {name}':<34}{found:>12}   formula {said:>12}")
    return "\n".join(
        [*lines, "", "a batch, rank by rank: a forward of micro-batch 0 is a, its backward AA", charts()]
    )


class Slow(Pipeline):
    """Stages that take as long as a real one, and leave the processor to the other ranks meanwhile."""

    boxes: list[Box]

    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """As ever, beginning with all ranks at once, with a clock."""
        self.boxes = []
        self.comm.barrier()
        self.begin = time.perf_counter()
        return super().run(tokens, targets)

    def _timed(self, what: str, i: int, seconds: float) -> None:
        now = time.perf_counter() - self.begin
        time.sleep(seconds)
        self.boxes.append(Box(what, i, now, now + seconds))

    def forward(self, i: int) -> None:
        """The stage sleeps after its input has come: the base class does both, so this wraps the layers."""
        stage, original = self.stage, self.stage.forward

        def slowly(x: Tensor, targets: Tensor) -> Tensor:
            self._timed("F", i, SLOWLY)
            return original(x, targets)

        stage.forward = slowly  # type: ignore[method-assign]
        try:
            super().forward(i)
        finally:
            stage.forward = original  # type: ignore[method-assign]
        self.kept[i][1].register_hook(lambda grad: self._timed("B", i, 2 * SLOWLY))


def _slow_batch(comm: Comm, schedule: str, micro_batches: int) -> list[Box]:
    trainer = Slow(GPT(CONFIG), comm, micro_batches, SCHEDULES[schedule])
    trainer.run(*data())
    return trainer.boxes


def in_seconds(schedule: str, micro_batches: int, ranks: int = RANKS) -> float:
    """The bubble by the clock: the stages sleep, and messages arrive when they do."""
    return bubble(run_world(_slow_batch, ranks, schedule, micro_batches))


def _drawn(plot: Any, name: str, rows: Sequence[Sequence[Box]]) -> None:
    for rank, row in enumerate(rows):
        for box in row:
            colour = FORWARD if box.what == "F" else BACKWARD
            where = {"color": colour, "edgecolor": INK, "linewidth": 0.4, "align": "center"}
            plot.barh(rank, box.end - box.start, 0.85, box.start, **where)
            at = (box.start + box.end) / 2
            plot.text(at, rank, box.micro_batch, ha="center", va="center", fontsize=7, color=INK)
    plot.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    plot.invert_yaxis()
    plot.set(title=f"{name}: {bubble(rows):.0%} idle", xlabel="time; a backward takes two forwards")
    plot.spines[["top", "right"]].set_visible(False)


def watched(comm: Comm, watcher: Any) -> None:
    """What `watch` shows line by line: a batch of four micro-batches, with one block on each rank."""
    config = GPTConfig(context=4, layers=RANKS, width=8)
    watcher.trainer = trainer = Pipeline(GPT(config), comm, micro_batches=4)
    watcher.phase = "a batch"
    trainer.run(*batch(load_text(), 4, config.context, torch.Generator().manual_seed(0)))
    watcher.phase = "update"
    trainer.step()


def main(world: int = RANKS) -> None:
    """Print what was measured, and plot it."""
    world = min(world, CONFIG.layers)
    print(f"{charts()}\n\nthe bubble\n{bubbles()}\n\n{kept()}\n\n{table()}\n")
    print(f"bytes alive at most, with 8 micro-batches\n{peaks()}\n")
    print("the bubble by the clock, with stages that sleep (it grows with what else this machine does)")
    for name in SCHEDULES:
        found = ", ".join(f"{m}: {in_seconds(name, m, world):.1%}" for m in (2, 4, 8))
        print(f"  {name}, {world} ranks, micro-batches: bubble  {found}")
    figure, (left, middle, right) = new_figure(3)
    both = {name: rows_of(name, 8, world) for name in SCHEDULES}
    _drawn(left, "1F1B", both["1F1B"])
    counts = (1, 2, 4, 8, 16)
    for (name, marker, size), colour in zip(
        (("GPipe", "s", 9), ("1F1B", "o", 5)), (BROWN, VIOLET), strict=True
    ):
        found = [100 * bubble(rows_of(name, m, world)) for m in counts]
        middle.plot(counts, found, marker, color=colour, markersize=size, label=name)
        right.plot(
            counts, [measured(name, m, world)[0].kept for m in counts], marker, color=colour, label=name
        )
    fine = [m / 10 for m in range(10, 161)]
    middle.plot(
        fine, [100 * (world - 1) / (m + world - 1) for m in fine], "--", color="black", label="formula"
    )
    right.plot(counts, counts, "--", color="black", label="formula: m")
    right.plot(counts, [min(world, m) for m in counts], ":", color="black", label="formula: at most p")
    for plot in (middle, right):
        plot.set_xticks(counts)
    label(middle, f"The bubble on {world} ranks", "micro-batches", "% of the ranks' time")
    label(right, "Rank 0 keeps at most", "micro-batches", "micro-batches' activations")
    right.legend(fontsize="small", loc="upper left")
    save(figure, 9)


if __name__ == "__main__":
    main()
