"""The bill of one training step, measured: what each rank holds, what it sends, what it did when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lessons.rows import Row, sizes_of
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Event, Ledger, held
from zero_min.thread_comm import run_world

KINDS = ("parameters", "gradients", "optimizer")
SMALL = GPTConfig(context=16, layers=1, width=32)


@dataclass(frozen=True)
class RankBill:
    """What one rank's ledger says after a step, before the gradients are let go."""

    shapes: dict[str, tuple[int, ...]]  # of every parameter of the model
    held: dict[str, int]
    live: int  # everything still allocated, whoever owns it
    peak: int
    sent: int  # in all steps
    events: tuple[Event, ...]  # of the last step

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every parameter of the model."""
        return tuple(sizes_of(self.shapes))


@dataclass(frozen=True)
class Bill:
    """All ranks' bills for one row of the demo, beside the formula's."""

    row: Row
    ranks: Sequence[RankBill]
    formula_held: dict[str, int]
    formula_sent: int  # in all steps

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(self.ranks[0].sizes)

    @property
    def held(self) -> int:
        """Bytes the fullest rank holds on its device."""
        return max(on_device(rank.held) for rank in self.ranks)

    @property
    def sent_in_all(self) -> int:
        """Bytes all ranks together sent in `row.steps` steps."""
        return sum(rank.sent for rank in self.ranks)

    @property
    def sent(self) -> float:
        """Bytes all ranks together send in a step, on average."""
        return self.sent_in_all / self.row.steps

    def facts(self) -> dict[str, Any]:
        """The measured bytes and the formula's, for a program to read."""
        measured = {"held": dict(self.ranks[0].held), "sent": self.sent_in_all}
        formula = {"formula_held": dict(self.formula_held), "formula_sent": self.formula_sent}
        about = {"row": self.row.name, "ranks": len(self.ranks), "parameters": self.numel}
        return {**about, "steps": self.row.steps, **measured, **formula, "exact": self.exact()}

    def exact(self) -> bool:
        """Whether every measured number is the formula's, as an integer."""
        return self.sent_in_all == self.formula_sent and all(
            rank.held == self.formula_held and rank.live == sum(rank.held.values()) for rank in self.ranks
        )


def on_device(held: Mapping[str, int]) -> int:
    """The bytes that are not on the host or on disk."""
    return sum(held.get(kind, 0) for kind in KINDS)


def one_step(comm: Comm, trainer: Any, data: Callable[[], tuple[Tensor, Tensor]], micro_batches: int) -> None:
    """One training step with its milestones written into the ledger's diary."""
    trainer.zero_grad()
    for _ in range(micro_batches):
        loss = trainer.model(*data()) / micro_batches
        comm.ledger.note("backward")
        trainer.backward(loss)
        del loss
    comm.ledger.note("step")
    trainer.step()
    comm.ledger.note("done")


def measure_rank(comm: Comm, row: Row, config: GPTConfig, micro_batches: int = 1) -> RankBill:
    """Train this rank for a few steps under the ledger's eyes and read the ledger."""
    text = load_text()
    generator = torch.Generator().manual_seed(comm.rank)
    comm.ledger = Ledger()  # what an earlier row left behind is not on this bill
    with comm.ledger.watch():
        model = GPT(config)
        trainer = row.trainer(model, comm, 1e-3, row.steps)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        sent = 0
        for _ in range(row.steps):
            comm.ledger.clear_traffic()
            one_step(comm, trainer, lambda: batch(text, 2, config.context, generator), micro_batches)
            sent += comm.ledger.total_sent()
        kinds = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
    ledger = comm.ledger
    comm.settle()  # unwatched: torch 2.11's barrier makes a tensor of one byte, and gloo keeps it
    return RankBill(shapes, kinds, ledger.live(), ledger.peak, sent, tuple(ledger.events))


def compare(row: Row, ranks: Sequence[RankBill]) -> Bill:
    """Put the formula beside what the ranks measured."""
    shapes, world_size = ranks[0].shapes, len(ranks)
    return Bill(row, ranks, row.held(shapes, world_size), row.sent(shapes, world_size, row.steps))


def measure(row: Row, world_size: int = 4, config: GPTConfig = SMALL) -> Bill:
    """The bill of one row, with threads as ranks."""
    return compare(row, run_world(measure_rank, world_size, row, config))


def table(bills: Sequence[Bill]) -> list[list[str]]:
    """Bytes per parameter, row by row, the header first. A column for the host only if somebody uses it."""
    away = any(len(bill.formula_held) > len(KINDS) for bill in bills)
    lines = [["", *KINDS, "held", "formula", *(["host"] if away else []), "sent", "formula"]]
    for bill in bills:
        n, ranks, steps = bill.numel, len(bill.ranks), bill.row.steps
        fullest = max(bill.ranks, key=lambda rank: on_device(rank.held)).held
        cells = [fullest.get(kind, 0) / n for kind in KINDS]
        cells += [bill.held / n, on_device(bill.formula_held) / n]
        cells += [(sum(fullest.values()) - on_device(fullest)) / n] if away else []
        cells += [bill.sent / ranks / n, bill.formula_sent / ranks / steps / n]
        lines.append([bill.row.name, *(f"{cell:.2f}" for cell in cells)])
    return lines


def timeline(bill: Bill) -> str:
    """A diary a rank, in words: what it did, what that sent, and the live bytes just then."""
    return diaries([rank.events for rank in bill.ranks])


def diaries(ranks: Sequence[Sequence[Event]]) -> str:
    """The same from the events of every rank."""
    lines = []
    for rank, events in enumerate(ranks):
        lines.append(f"rank {rank}")
        for what, count, sent, live in runs(events):
            times = f" x{count}" if count > 1 else ""
            lines.append(f"  {what + times:<22}{f'sent {sent:>9,}' if sent else '':<16}live {live:>10,}")
    return "\n".join(lines)


def runs(events: Sequence[Event]) -> list[tuple[str, int, int, int]]:
    """Neighbouring events of one kind as one line: (what, how often, bytes sent, live at the end)."""
    runs: list[tuple[str, int, int, int]] = []
    for event in events:
        if runs and runs[-1][0] == event.what:
            _, count, sent, _ = runs.pop()
            runs.append((event.what, count + 1, sent + event.sent, event.live))
        else:
            runs.append((event.what, 1, event.sent, event.live))
    return runs
