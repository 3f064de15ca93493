"""The bill of one training step, measured: what each rank holds, what it sends, what it did when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lessons.registry import Parts, Row
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Event, held
from zero_min.thread_comm import run_world

KINDS = ("parameters", "gradients", "optimizer")
ZERO_MIN = Parts()
SMALL = GPTConfig(context=32, layers=2, width=32)
STEPS = 2


@dataclass(frozen=True)
class RankBill:
    """What one rank's ledger says after a step, before the gradients are let go."""

    numel: int  # parameters of the whole model
    held: dict[str, int]
    live: int  # everything still allocated, whoever owns it
    peak: int
    sent: int  # in the last step
    events: tuple[Event, ...]  # of the last step


@dataclass(frozen=True)
class Bill:
    """All ranks' bills for one row of the demo, beside the formula's."""

    row: Row
    ranks: Sequence[RankBill]
    formula_held: dict[str, int]
    formula_sent: int

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return self.ranks[0].numel

    @property
    def held(self) -> int:
        """Bytes the fullest rank holds."""
        return max(sum(rank.held.values()) for rank in self.ranks)

    @property
    def sent(self) -> int:
        """Bytes all ranks together sent."""
        return sum(rank.sent for rank in self.ranks)

    def exact(self) -> bool:
        """Whether every measured number is the formula's, as an integer."""
        return self.sent == self.formula_sent and all(
            rank.held == self.formula_held and rank.live == sum(rank.held.values()) for rank in self.ranks
        )


def measure_rank(
    comm: Comm, row: Row, config: GPTConfig, parts: Any = ZERO_MIN, micro_batches: int = 1
) -> RankBill:
    """Train this rank for two steps under the ledger's eyes and read the ledger."""
    text = load_text()
    generator = torch.Generator().manual_seed(comm.rank)
    with comm.ledger.watch():
        model = GPT(config)
        trainer = row.trainer(parts, model, comm, lr=1e-3)
        for _ in range(STEPS):
            comm.ledger.clear_traffic()
            trainer.zero_grad()
            for _ in range(micro_batches):
                loss = model(*batch(text, 2, config.context, generator)) / micro_batches
                comm.ledger.note("backward")
                trainer.backward(loss)
                del loss
            comm.ledger.note("step")
            trainer.step()
            comm.ledger.note("done")
        numel = sum(p.numel() for p in model.parameters())
        kinds = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
        ledger = comm.ledger
        return RankBill(numel, kinds, ledger.live(), ledger.peak, ledger.total_sent(), tuple(ledger.events))


def compare(row: Row, ranks: Sequence[RankBill]) -> Bill:
    """Put the formula beside what the ranks measured."""
    numel, world_size = ranks[0].numel, len(ranks)
    return Bill(row, ranks, row.held([numel], world_size), row.sent([numel], world_size))


def measure(row: Row, world_size: int = 4, config: GPTConfig = SMALL, parts: Any = ZERO_MIN) -> Bill:
    """The bill of one row, with threads as ranks."""
    return compare(row, run_world(measure_rank, world_size, row, config, parts))


def table(bills: Sequence[Bill]) -> list[list[str]]:
    """Bytes a parameter, row by row: the header first."""
    lines = [["", *KINDS, "held", "formula", "sent", "formula"]]
    for bill in bills:
        n, ranks = bill.numel, len(bill.ranks)
        fullest = max(bill.ranks, key=lambda rank: sum(rank.held.values()))
        cells = [fullest.held[kind] / n for kind in KINDS]
        cells += [bill.held / n, sum(bill.formula_held.values()) / n]
        cells += [bill.sent / ranks / n, bill.formula_sent / ranks / n]
        lines.append([bill.row.name, *(f"{cell:.2f}" for cell in cells)])
    return lines


def timeline(bill: Bill) -> str:
    """A diary a rank, in words: what it did, what that sent, and the live bytes just then."""
    lines = []
    for rank, measured in enumerate(bill.ranks):
        lines.append(f"rank {rank}")
        for what, count, sent, live in _runs(measured.events):
            times = f" x{count}" if count > 1 else ""
            lines.append(f"  {what + times:<22}{f'sent {sent:>9,}' if sent else '':<16}live {live:>10,}")
    return "\n".join(lines)


def _runs(events: Sequence[Event]) -> list[tuple[str, int, int, int]]:
    """Neighbouring events of one kind as one line: (what, how often, bytes sent, live at the end)."""
    runs: list[tuple[str, int, int, int]] = []
    for event in events:
        if runs and runs[-1][0] == event.what:
            _, count, sent, _ = runs.pop()
            runs.append((event.what, count + 1, sent + event.sent, event.live))
        else:
            runs.append((event.what, 1, event.sent, event.live))
    return runs
