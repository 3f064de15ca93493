"""Step 5, measured: what waits on the device, on the host and on disk, and the copies that costs.

Run it with `python -m lessons run 5`.
"""

import itertools
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lessons.bill import one_step
from lessons.cells import columns, run_cell
from lessons.colours import AWAY, DISK, GRADIENTS, OPTIMIZER, PARAMETERS, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import Stage2, Stage2Disk, Stage2Offload, run_world
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Event, held

SMALL = GPTConfig(context=32, layers=2, width=32)
STAGES: dict[str, type[Stage2]] = {"stage 2": Stage2, "offload": Stage2Offload, "disk": Stage2Disk}
PLACES = ("device", "host", "disk")
MICRO_BATCHES = (1, 2, 4)
CHUNKS = (256, 1024, 4096, 16384)
STEPS = 2
DOWN, UP, READ, WRITTEN = "device to host", "host to device", "disk to host", "host to disk"


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(5, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(5, "Break it")


@dataclass(frozen=True)
class Rank:
    """What one rank holds after a step in 16 bits, place by place, and what it copied in that step."""

    numel: int  # parameters of the whole model
    held: dict[str, int]
    moved: dict[str, int]
    sent: int
    events: tuple[Event, ...]
    seconds: float  # of the last step


def _place(kind: str) -> str:
    first = kind.split()[0]
    return first if first in PLACES else "device"


def _rank(
    comm: Comm, name: str, folder: Path, micro_batches: int, watch: bool, options: dict[str, Any]
) -> Rank:
    text, generator = load_text(), torch.Generator().manual_seed(comm.rank)
    extra = {**options, "folder": folder} if name == "disk" else options
    with comm.ledger.watch() if watch else nullcontext():
        model = GPT(SMALL).bfloat16()
        trainer = STAGES[name](model, comm, lr=1e-3, **extra)
        for _ in range(STEPS):
            comm.ledger.clear_traffic()
            begin = time.perf_counter()
            one_step(comm, trainer, lambda: batch(text, 2, SMALL.context, generator), micro_batches)
        kept = dict.fromkeys(PLACES, 0)
        for kind, tensors in trainer.holdings().items():
            kept[_place(kind)] += held(tensors)
        seconds, ledger = time.perf_counter() - begin, comm.ledger
        numel = sum(p.numel() for p in model.parameters())
        events, moved = tuple(ledger.events), dict(ledger.moved)
        return Rank(numel, kept, moved, ledger.total_sent(), events, seconds)


@cache
def _ranks(
    name: str, world: int, micro_batches: int = 1, watch: bool = False, **options: Any
) -> tuple[Rank, ...]:
    """All ranks' measurements; the files of a disk run are gone when it is over."""
    with tempfile.TemporaryDirectory() as folder:
        return tuple(run_world(_rank, world, name, Path(folder), micro_batches, watch, options))


def _each(ranks: tuple[Rank, ...], what: str) -> float:
    """Bytes per parameter of the model that all ranks together copied one way."""
    return sum(rank.moved.get(what, 0) for rank in ranks) / ranks[0].numel


def places(world: int = 4) -> str:
    """Bytes per parameter that one rank holds in each memory, on one rank and on `world` ranks."""
    rows: list[list[object]] = [["", "ranks", *PLACES, "device by formula", "elsewhere by formula"]]
    for n, name in itertools.product(sorted({1, world}), STAGES):
        ranks = _ranks(name, n)
        cells = [max(rank.held[place] for rank in ranks) / ranks[0].numel for place in PLACES]
        formula = [2 + 14 / n, 0] if name == "stage 2" else [2, 14 / n]
        rows.append([name, n, *(f"{cell:.2f}" for cell in [*cells, *formula])])
    return columns(rows)


def micro_batches(world: int = 4) -> str:
    """What all ranks together copy in a step of 1, 2 and 4 micro-batches, in bytes per parameter."""
    rows: list[list[object]] = [["micro-batches", "down", "2m", "up", "2", "sent", "sent without offload"]]
    for m in MICRO_BATCHES:
        ranks, usual = _ranks("offload", world, m), _ranks("stage 2", world, m)
        sent = [sum(rank.sent for rank in each) / world / ranks[0].numel for each in (ranks, usual)]
        cells = [_each(ranks, DOWN), 2 * m, _each(ranks, UP), 2, *sent]
        rows.append([m, *(f"{cell:.2f}" for cell in cells)])
    return columns(rows)


def chunks(world: int = 4) -> str:
    """What the disk reads and writes in a step, and how much room a chunk needs, for several sizes."""
    rows: list[list[object]] = [["chunk", "visits of rank 0", "bytes of a visit", "read", "written", "12"]]
    for chunk in CHUNKS:
        ranks = _ranks("disk", world, chunk=chunk)
        reads = [event for event in ranks[0].events if event.what == READ]
        largest = f"{max(event.sent for event in reads):,}"
        cells = [_each(ranks, READ), _each(ranks, WRITTEN), 12.0]
        rows.append([f"{chunk:,}", len(reads), largest, *(f"{cell:.2f}" for cell in cells)])
    return columns(rows)


def diary(name: str = "offload", world: int = 4, bucket_size: int = 4096) -> str:
    """What rank 0 did in one step: copies and collectives in their order, with bytes and live bytes."""
    lines: list[list[object]] = [["", "times", "bytes", "live"]]
    events = _ranks(name, world, watch=True, bucket_size=bucket_size)[0].events
    for what, group in itertools.groupby(events, key=lambda event: event.what):
        run = list(group)
        nbytes = sum(event.sent for event in run)
        lines.append([what, len(run), f"{nbytes:,}" if nbytes else "", f"{run[-1].live:,}"])
    return columns(lines)


def disk_diary() -> str:
    """The same for the disk, from the end of backward on, with chunks of 4,096."""
    ranks = _ranks("disk", 4, chunk=4096)
    events = ranks[0].events
    after = events[[event.what for event in events].index("step") :]
    return columns([["", "bytes"], *([event.what, f"{event.sent:,}"] for event in after)])


def in_flight() -> str:
    """Bytes per parameter of gradient on the device when backward ends, on 1 and on 4 ranks."""
    rows: list[list[object]] = [["ranks", "pieces kept until they have landed", "2/N"]]
    for n in (1, 4):
        ranks = _ranks("offload", n)
        own = max(rank.moved[DOWN] for rank in ranks) / ranks[0].numel
        rows.append([n, f"{own:.2f}", f"{2 / n:.2f}"])
    return columns(rows)


def main(world: int = 4) -> None:
    """Print and plot what waits where, and what is copied, against 2m + 2 and 12 + 12."""
    print(f"bytes per parameter that a rank holds\n{places(world)}\n")
    print(
        f"bytes per parameter that {world} ranks copy together\n{micro_batches(world)}\n\n{chunks(world)}\n"
    )
    for name in STAGES:
        slowest = max(rank.seconds for rank in _ranks(name, world))
        print(f"{name}: one step took {1000 * slowest:.1f} ms here, with threads as ranks and no GPU")
    figure, (left, middle, right) = new_figure(3)
    below = [0.0] * len(STAGES)
    for place, colour in zip(PLACES, (VIOLET, AWAY, DISK), strict=True):
        heights = []
        for name in STAGES:
            ranks = _ranks(name, world)
            heights.append(max(rank.held[place] for rank in ranks) / ranks[0].numel)
        left.bar(list(STAGES), heights, bottom=below, color=colour, label=place)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    left.axhline(2 + 14 / world, linestyle="--", color="black", label=f"formula: 2 + 14/{world}")
    left.axhline(2, linestyle=":", color="black", label="formula on the device: 2")
    label(left, f"Who waits where, {world} ranks", "stage 2, 16 bits", "bytes per parameter and rank")
    left.set_ylim(0, 1.75 * (2 + 14 / world))  # the legend has five lines
    for what, colour, marker in ((DOWN, GRADIENTS, "v"), (UP, PARAMETERS, "^")):
        copied = [_each(_ranks("offload", world, m), what) for m in MICRO_BATCHES]
        middle.plot(MICRO_BATCHES, copied, marker, color=colour, label=what)
    middle.plot(MICRO_BATCHES, [2 * m for m in MICRO_BATCHES], "--", color="black", label="formula: 2m")
    middle.plot(MICRO_BATCHES, [2] * len(MICRO_BATCHES), ":", color="black", label="formula: 2")
    middle.set_xticks(MICRO_BATCHES)
    label(middle, "Offload: copied in a step", "micro-batches m", "bytes per parameter, all ranks")
    for i, (what, fill) in enumerate(((READ, OPTIMIZER), (WRITTEN, "none"))):
        copied = [_each(_ranks("disk", world, chunk=chunk), what) for chunk in CHUNKS]
        right.bar(
            [x + 0.4 * i - 0.2 for x in range(len(CHUNKS))],
            copied,
            0.34,
            color=fill,
            label=what,
            edgecolor=OPTIMIZER,
        )
    right.axhline(12, linestyle="--", color="black", label="formula: 12 each way")
    right.set_xticks(range(len(CHUNKS)), [f"{chunk:,}" for chunk in CHUNKS])
    label(right, "Disk: copied in a step", "chunk in elements", "bytes per parameter, all ranks")
    save(figure, 5)


if __name__ == "__main__":
    main()
