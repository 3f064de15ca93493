"""Step 7, measured: what a cut does to a matrix, who gets the work, what the visit costs, and what it buys.

Run it with `python -m lessons run 7`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.plots import RANKS, label, new_figure, save
from lessons.rows import ROWS, sizes_of
from zero_min import AdamW, Stage2, Stage2Muon, run_world
from zero_min.comm import Comm
from zero_min.formula import muon_visits
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.muon import A, B, C, choose_owners, hidden_matrices, orthogonalize, work

CONFIG = GPTConfig(context=32, layers=2, width=32)
SAME_BYTES = [(64, 64), (16, 256), (8, 512), (4, 1024)]
STEPS, BATCH = 120, 8


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(7, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(7, "Break it")


def _exactly(matrix: Tensor) -> Tensor:
    """Orthogonal without an approximation, by the singular value decomposition."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def _row(name: str, values: Tensor) -> list[object]:
    return [name, *(f"{value:+.2f}" for value in values.flatten().tolist())]


def two_rows() -> str:
    """A matrix of 2 x 2 made orthogonal, and its two rows made orthogonal each by itself."""
    matrix = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    halves = torch.cat([_exactly(half) for half in matrix.split(1)])
    rows = [_row("the matrix", matrix), _row("made orthogonal", _exactly(matrix))]
    return columns([["", "first row", "", "second row", ""], *rows, _row("its rows, one by one", halves)])


def _cut(matrix: Tensor, parts: int) -> Tensor:
    """Each part of the rows made orthogonal by itself."""
    return torch.cat([orthogonalize(part) for part in matrix.chunk(parts)]).float()


def _drawn(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def halves() -> str:
    """A larger matrix, whole and cut between 1, 2, 4 and 8 ranks: what comes out."""
    matrix = _drawn(64, 64)
    whole = orthogonalize(matrix).float()
    rows: list[list[object]] = [["cut into", "smallest", "largest", "difference from whole"]]
    for parts in (1, 2, 4, 8):
        made = _cut(matrix, parts)
        values = torch.linalg.svdvals(made)
        off = float((made - whole).norm() / whole.norm())
        rows.append([parts, f"{float(values.min()):.2f}", f"{float(values.max()):.2f}", f"{off:.0%}"])
    return columns(rows)


def polynomial() -> str:
    """What five steps make of single singular values."""
    values = [1.0, 0.5, 0.1, 0.01, 0.001]
    rows: list[list[object]] = [["after step", *(f"{value:g}" for value in values)]]
    for step in range(1, 6):
        values = [A * s + B * s**3 + C * s**5 for s in values]
        rows.append([step, *(f"{value:.3f}" for value in values)])
    return columns(rows)


def _loads(owners: Sequence[int], ranks: int) -> list[int]:
    return [
        sum(work(shape) for shape, owner in zip(SAME_BYTES, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]


def _by_bytes(ranks: int) -> list[int]:
    """The largest tensor first, to the rank that has the fewest elements: here all are of one size."""
    loads, owners = [0] * ranks, []
    for shape in SAME_BYTES:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += prod(shape)
    return owners


def dealt() -> str:
    """Four matrices of the same number of elements, dealt to two ranks by bytes and by work."""
    by_bytes, by_work = _by_bytes(2), choose_owners(SAME_BYTES, 2)
    rows: list[list[object]] = [["matrix", "elements", "work", "owner by bytes", "owner by work"]]
    for shape, *owners in zip(SAME_BYTES, by_bytes, by_work, strict=True):
        rows.append([f"{shape[0]} x {shape[1]}", f"{prod(shape):,}", f"{work(shape):,}", *owners])
    for rank in range(2):
        loads = [f"{_loads(owners, 2)[rank]:,}" for owners in (by_bytes, by_work)]
        rows.append([f"work of rank {rank}", "", "", *loads])
    return columns(rows)


def _one_visit(comm: Comm) -> tuple[list[int], list[int], int, int]:
    trainer = Stage2Muon(GPT(CONFIG), comm)
    generator = torch.Generator().manual_seed(comm.rank)
    comm.ledger.clear_traffic()
    trainer.backward(trainer.model(*batch(load_text(), 2, CONFIG.context, generator)))
    trainer.step()
    sizes = [p.numel() for p in trainer.group.params]
    return sizes, trainer.owners, comm.ledger.sent["all_to_all"], comm.ledger.total_sent()


def visits(ranks: Sequence[int] = (1, 2, 4, 8)) -> list[tuple[int, int, int, int, int]]:
    """Ranks; bytes of the visits, measured and by the formula; all bytes of a step; elements of matrices."""
    found = []
    for n in ranks:
        answers = run_world(_one_visit, n)
        sizes, owners, *_ = answers[0]
        measured, everything = (sum(answer[k] for answer in answers) for k in (2, 3))
        found.append((n, measured, 4 * muon_visits(sizes, owners, n), everything, sum(sizes)))
    return found


def volume() -> str:
    """What the visits cost in a small GPT, beside all that travels in a step."""
    rows: list[list[object]] = [["ranks", "measured", "formula", "an element", "of all that is sent"]]
    for n, measured, formula, everything, numel in visits():
        share = f"{measured / everything:.1%}" if everything else "-"
        rows.append([n, f"{measured:,}", f"{formula:,}", f"{measured / numel:.2f}", share])
    return columns(rows)


class CutMuon(Stage2Muon):
    """Nobody visits anybody: each rank takes its piece of a matrix for a matrix."""

    def visit(self, mine: Tensor) -> list[Tensor]:
        """What is made of my own pieces."""
        answers = []
        for owner in range(self.comm.world_size):
            made = [mine[:0].bfloat16()]
            for i, place in zip(self.matrices_of(owner), self.pieces(self.comm.rank, owner), strict=True):
                piece, width = mine[place], self.group.params[i].shape[1]
                if piece.numel():
                    rows = F.pad(piece, (0, -piece.numel() % width)).view(-1, width)
                    made.append(orthogonalize(rows).reshape(-1)[: piece.numel()])
            answers.append(torch.cat(made))
        return answers


def _first_step(comm: Comm, make: Callable[..., Any]) -> Tensor:
    """Where the hidden matrices are after one step of 0.02, if all ranks read the same."""
    trainer = make(GPT(CONFIG), comm)
    generator = torch.Generator().manual_seed(0)
    trainer.backward(trainer.model(*batch(load_text(), BATCH, CONFIG.context, generator)))
    trainer.step()
    return torch.cat([p.detach().flatten() for p in hidden_matrices(trainer.model)])


def by_ranks() -> str:
    """How far the first step ends from that of one rank alone, in lengths of the step."""
    rows: list[list[object]] = [["ranks", "visiting owners", "cut"]]
    start = torch.cat([p.detach().flatten() for p in hidden_matrices(GPT(CONFIG))])
    alone = run_world(_first_step, 1, Stage2Muon)[0]
    for n in (2, 4, 8):
        found = [run_world(_first_step, n, make)[0] for make in (Stage2Muon, CutMuon)]
        off = [float((each - alone).norm() / (alone - start).norm()) for each in found]
        rows.append([n, *(f"{each:.2f}" for each in off)])
    return columns(rows)


TRAINERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(Stage2, optimizer=AdamW, lr=3e-3),
    "Muon": partial(Stage2Muon, lr=0.02, adam_lr=3e-3),
    "Muon on cut matrices": partial(CutMuon, lr=0.02, adam_lr=3e-3),
}
COLOURS = dict(zip(TRAINERS, (BROWN, VIOLET, OLIVE), strict=True))


def _learn(comm: Comm, make: Callable[..., Any], seed: int) -> list[float]:
    text, generator = load_text(), torch.Generator().manual_seed(100 * seed + comm.rank)
    trainer, losses = make(GPT(CONFIG, seed), comm), []
    for _ in range(STEPS):
        trainer.zero_grad()
        loss = trainer.model(*batch(text, BATCH, CONFIG.context, generator))
        trainer.backward(loss)
        trainer.step()
        losses.append(float(loss.detach()))
    return losses


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    means = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(each) / len(each) for each in means]


def main(world: int = 4) -> None:
    """Print what was measured; plot it beside short training runs."""
    print(f"singular values of 64 x 64, made orthogonal in parts\n{halves()}\n\n{dealt()}\n")
    print(f"how far a first step ends from that of one rank, in lengths of the step\n{by_ranks()}\n")
    print(f"bytes that all ranks send for the visits in a step\n{volume()}\n")
    shapes = {name: tuple(p.shape) for name, p in GPT(CONFIG).named_parameters()}
    hidden = sum(p.numel() for p in hidden_matrices(GPT(CONFIG)))
    held = next(row for row in ROWS if row.lesson == 7).held(shapes, world)
    print(
        f"{hidden / sum(sizes_of(shapes)):.0%} of the parameters are Muon's; a rank of {world} holds {held}"
    )
    figure, (left, middle, right) = new_figure(3)
    for (_, dash), parts in zip(RANKS, (1, 2, 4, 8), strict=True):
        made, colour = _cut(_drawn(64, 64), parts), OLIVE if parts > 1 else VIOLET  # as on the right
        left.plot(torch.linalg.svdvals(made).tolist(), dash, color=colour, label=f"cut into {parts}")
    label(left, "64 x 64, made orthogonal in parts", "number of the singular value", "singular value")
    found = visits([n for n in (1, 2, 4, 8) if n <= max(2, world)])
    middle.plot([f[0] for f in found], [f[1] / f[4] for f in found], "o", color=VIOLET, label="measured")
    middle.plot([f[0] for f in found], [f[2] / f[4] for f in found], "--", color="black", label="formula")
    middle.set_xticks([f[0] for f in found])
    label(middle, "What the visits send, all ranks together", "ranks", "bytes an element of a matrix")
    for name, make in TRAINERS.items():
        runs = [run_world(_learn, world, make, seed)[0] for seed in (0, 1, 2)]
        mean = [sum(each) / len(runs) for each in zip(*map(_smooth, runs), strict=True)]
        ends = ", ".join(f"{_smooth(run)[-1]:.3f}" for run in runs)
        print(f"{name}: loss of the last 10 of {STEPS} steps on {world} ranks, seed by seed: {ends}")
        right.plot(
            mean, "--" if make is TRAINERS["Muon on cut matrices"] else "-", color=COLOURS[name], label=name
        )
    label(right, f"Training, {world} ranks, mean of three seeds", "step", "loss, mean of 10 steps")
    right.set_ylim(2.0, 4.5)
    save(figure, 7)


if __name__ == "__main__":
    main()
