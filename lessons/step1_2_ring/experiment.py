"""Step 1/2, measured: what messages cost that are sent in a ring, and in two simpler ways.

Run it with `python -m lessons run 1/2`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons.bill import SMALL, measure_rank
from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.exercise import blank_in
from lessons.plots import label, new_figure, save
from lessons.rows import ROWS, Row, sizes_of
from zero_min import ThreadComm, WorldError, ring, run_world
from zero_min.comm import Comm
from zero_min.ring import RingComm

NUMEL = 840  # every number of ranks up to 8 divides it


def to_everyone(comm: Comm, tensor: Tensor) -> Tensor:
    """Everybody sends everybody everything, and adds up what comes."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    for rank in others:
        comm.send(tensor, rank)
    for rank in others:
        tensor = tensor + comm.receive(tensor, rank)
    return tensor


def through_rank_0(comm: Comm, tensor: Tensor) -> Tensor:
    """Everybody sends rank 0 everything; it adds up, and sends everybody the sum."""
    others = range(1, comm.world_size)
    if comm.rank > 0:
        comm.send(tensor, 0)
        return comm.receive(tensor, 0)
    for rank in others:
        tensor = tensor + comm.receive(tensor, rank)
    for rank in others:
        comm.send(tensor, rank)
    return tensor


WAYS: dict[str, Callable[[Comm, Tensor], Tensor]] = {
    "to everyone": to_everyone,
    "through rank 0": through_rank_0,
    "ring": ring.all_reduce,
}


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell("1/2", "Run it")


def broken() -> str:
    """The error of the lesson's broken cell."""
    return run_cell("1/2", "Break it")


class Listening(ThreadComm):
    """Writes down what it says to whom."""

    said: list[str]

    def send(self, tensor: Tensor, to: int) -> None:
        """As ever, and remember what was said."""
        self.said.append(f"[{', '.join(f'{x:g}' for x in tensor.tolist())}] to {to}")
        super().send(tensor, to)


def messages(world: int, numel: int) -> list[list[str]]:
    """All messages of an all-reduce, rank by rank. Rank 0 has 1, 2, 3, ...; each next rank ten times that."""

    def body(comm: Listening) -> list[str]:
        comm.said = []
        ring.all_reduce(comm, torch.arange(1.0, numel + 1) * 10**comm.rank)
        return comm.said

    return run_world(body, world, telephone=Listening)


def rounds() -> str:
    """What each of three ranks says in each round of an all-reduce of six numbers."""
    header = ["round", *(f"rank {rank} sends" for rank in range(3))]
    each_round = enumerate(zip(*messages(3, 6), strict=True), start=1)
    return columns([header, *([number, *said] for number, said in each_round)])


def sent_by_each(way: Callable[[Comm, Tensor], Tensor], world: int) -> list[float]:
    """What each rank sends, in units of the tensor."""

    def body(comm: Comm) -> int:
        way(comm, torch.ones(NUMEL))
        return comm.ledger.sent["send"]

    return [sent / (4 * NUMEL) for sent in run_world(body, world)]


def more_ranks(world: int = 8) -> str:
    """What the busiest rank sends, in units of the tensor, on 1 to `world` ranks."""
    rows: list[list[object]] = [["ranks", *WAYS, "2 (N-1)/N"]]
    for n in _worlds(world):
        most = [max(sent_by_each(way, n)) for way in WAYS.values()]
        rows.append([n, *(f"{each:.2f}" for each in most), f"{2 * (n - 1) / n:.2f}"])
    return columns(rows)


def _worlds(world: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 5, 6, 7, 8) if n <= world]


def _stage(row: Row, telephone: type[ThreadComm]) -> list[int]:
    """The bytes that each of four ranks sends in two steps of the small GPT."""
    return [rank.sent for rank in run_world(measure_rank, 4, row, SMALL, telephone=telephone)]


def stages() -> str:
    """What each rank is charged for, stage by stage, and whether the ring's messages come to the same."""
    rows: list[list[object]] = [["", "rank 0", "rank 1", "rank 2", "rank 3", "over the ring the same"]]
    for row in ROWS[:4]:
        usual, counted = _stage(row, ThreadComm), _stage(row, RingComm)
        rows.append([row.name, *(f"{sent:,}" for sent in usual), "yes" if usual == counted else "no"])
    return columns(rows)


def order() -> str:
    """One sum in the order of the ranks and in that of the ring, in fp32 and in bf16."""
    rows: list[list[object]] = [["numbers of ranks 0, 1, 2, 3", "type", "in rank order", "over the ring"]]
    for values, dtype in (([1e8, 1.0, -1e8, 1.0], torch.float32), ([1.0, 256.0, 1.0, 1.0], torch.bfloat16)):

        def body(comm: Comm, values: Sequence[float] = values, dtype: torch.dtype = dtype) -> list[float]:
            x = torch.full((4,), values[comm.rank], dtype=dtype)
            return [float(sums[0]) for sums in (comm.all_reduce(x.clone()), ring.all_reduce(comm, x))]

        sums = run_world(body, 4)[0]
        names = " ".join(f"{x:g}" for x in values)
        rows.append([names, str(dtype).removeprefix("torch."), *(f"{x:g}" for x in sums)])
    return columns(rows)


def bill() -> str:
    """What `check` shows at its end: every stage's bytes over this ring, beside the formula."""
    shapes = run_world(measure_rank, 1, ROWS[0], SMALL)[0].shapes
    lines = [f"stages 0 to 3 over your ring, 4 ranks and {sum(sizes_of(shapes)):,} parameters, bytes:"]
    for row in ROWS[:4]:
        name = f"{row.name}, sent by all in {row.steps} steps"
        try:
            counted = _stage(row, RingComm)
        except WorldError as error:
            met = blank_in(error)
            if met is None:
                raise
            lines.append(f"  {row.name}: lesson {met[0]} is blank here")
            continue
        lines.append(f"  {name:<34}{sum(counted):>12,}   formula {row.sent(shapes, 4, row.steps):>12,}")
    said = [f"  rank {rank}: {'; '.join(each)}" for rank, each in enumerate(messages(4, 8))]
    return "\n".join([*lines, "", "what each rank sends in an all-reduce of eight numbers:", *said])


def watched(comm: Comm, watcher: Any) -> None:
    """What `watch` shows line by line: an all-reduce of eight numbers."""
    watcher.phase = "an all-reduce"
    ring.all_reduce(comm, torch.arange(2.0 * comm.world_size))


def main(world: int = 8) -> None:
    """Measure three ways to add up on 1, 2, ... `world` ranks; print and plot them."""
    print("what the busiest rank sends for an all-reduce, in units of the tensor")
    print(more_ranks(world))
    worlds = _worlds(world)
    figure, (left, right) = new_figure(2)
    for plot, of in ((left, max), (right, sum)):
        looks = (("s", BROWN, 11), ("v", OLIVE, 7), ("o", VIOLET, 4))  # large ones are seen behind small ones
        for (name, way), (marker, colour, size) in zip(WAYS.items(), looks, strict=True):
            sent = [of(sent_by_each(way, n)) for n in worlds]
            plot.plot(worlds, sent, marker, color=colour, markersize=size, label=name)
    left.plot(worlds, [2 * (n - 1) / n for n in worlds], "--", color="black", label="2 (N-1)/N")
    right.plot(worlds, [2 * (n - 1) for n in worlds], "--", color="black", label="2 (N-1)")
    label(left, "The busiest rank sends", "ranks N", "times the tensor")
    label(right, "All ranks together send", "ranks N", "times the tensor")
    save(figure, "1_2")


if __name__ == "__main__":
    main()
