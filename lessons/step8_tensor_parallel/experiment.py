"""Step 8, measured: is it the plain model, what does a rank hold, what does it send, what stays uncut?

Run it with `python -m lessons run 8`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lessons.bill import SMALL, diaries
from lessons.cells import columns, run_cell
from lessons.colours import BROWN, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import Stage3, run_world
from zero_min.comm import Comm
from zero_min.formula import sent as zero_sent
from zero_min.formula import tensor_parallel_held, tensor_parallel_sent
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Event, held
from zero_min.tensor_parallel import TensorParallel, cut_parameters

CONFIG = GPTConfig(context=32, layers=2, width=32)
RANKS = (1, 2, 4)


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(8, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(8, "Break it")


def rows(config: GPTConfig, size: int) -> tuple[Tensor, Tensor]:
    """What all ranks read: the same."""
    return batch(load_text(), size, config.context, torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Measured:
    """One rank's step."""

    loss: float
    gradients: dict[str, Tensor]  # of what is whole on every rank
    held: dict[str, int]
    cut: int  # elements of the parameters in parts, as many as this rank has
    activations: int  # bytes that are alive after the forward, beside the parameters
    sent: int
    events: tuple[Event, ...]


def _one_step(comm: Comm, config: GPTConfig, size: int, dtype: torch.dtype) -> Measured:
    load_text()  # it is everybody's, and no part of the step
    with comm.ledger.watch():
        model = GPT(config).to(dtype)
        trainer = TensorParallel(model, comm)
        comm.ledger.clear_traffic()
        before = comm.ledger.live()
        comm.ledger.note("forward")
        loss = trainer.model(*rows(config, size))
        activations = comm.ledger.live() - before
        comm.ledger.note("backward")
        trainer.backward(loss)
        value = float(loss.detach())
        del loss
        comm.ledger.note("step")
        trainer.step()
        comm.ledger.note("done")
        cut = cut_parameters(trainer.model)
        named = trainer.model.named_parameters()
        whole = {name: p.grad for name, p in named if p.grad is not None and all(p is not c for c in cut)}
        kinds = {kind: held(tensors) for kind, tensors in trainer.holdings().items()}
        elements = sum(p.numel() for p in cut)
        sent, events = comm.ledger.total_sent(), tuple(comm.ledger.events)
        return Measured(value, whole, kinds, elements, activations, sent, events)


@cache
def measured(
    ranks: int, config: GPTConfig = CONFIG, size: int = 2, dtype: torch.dtype = torch.float32
) -> list[Measured]:
    """A step on so many ranks."""
    return run_world(_one_step, ranks, config, size, dtype)


def parity() -> str:
    """The loss and the gradients of 1, 2 and 4 ranks beside those of the plain model, in fp64."""
    model = GPT(CONFIG).double()
    loss = model(*rows(CONFIG, 2))
    loss.backward()
    plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    table: list[list[object]] = [["", "loss", "gradients equal to 5 digits"]]
    table.append(["plain", f"{float(loss.detach()):.6f}", ""])
    for n in RANKS:
        run = measured(n, dtype=torch.float64)[0]
        off = max(float((plain[name] - g).abs().max() / g.abs().max()) for name, g in run.gradients.items())
        table.append([f"on {n}", f"{run.loss:.6f}", "yes" if off < 1e-5 else "no"])
    return columns(table)


def _formula(ranks: int, config: GPTConfig, size: int) -> tuple[dict[str, int], int]:
    cut = ranks * measured(ranks, config, size)[0].cut
    everything = sum(p.numel() for p in GPT(config).parameters())
    tokens = size * config.context
    kinds = tensor_parallel_held(cut, everything - cut, ranks)
    return kinds, tensor_parallel_sent(config.layers, tokens, config.width, ranks)


def table() -> str:
    """What a rank holds between steps and what all send in one, measured and by the formula, in bytes."""
    lines: list[list[object]] = [["ranks", "a rank holds", "formula", "all send", "formula"]]
    for n in RANKS:
        kinds, sent = _formula(n, CONFIG, 2)
        runs = measured(n)
        held_by_rank = {sum(run.held.values()) for run in runs}
        (got,) = held_by_rank  # it is the same on every rank
        total = sum(run.sent for run in runs)
        lines.append([n, f"{got:,}", f"{sum(kinds.values()):,}", f"{total:,}", f"{sent:,}"])
    return columns(lines)


def uncut() -> str:
    """What is alive after forward beside the parameters, on 1, 2 and 4 ranks, in bytes a token."""
    tokens = 2 * CONFIG.context
    one = measured(1)[0].activations / tokens
    lines: list[list[object]] = [["ranks", "bytes a token", "if all of it were cut"]]
    for n in RANKS:
        lines.append([n, f"{measured(n)[0].activations / tokens:,.0f}", f"{one / n:,.0f}"])
    return columns(lines)


def _stage3(comm: Comm, size: int) -> int:
    trainer = Stage3(GPT(CONFIG), comm)
    comm.ledger.clear_traffic()
    trainer.backward(trainer.model(*rows(CONFIG, size)))
    trainer.step()
    return comm.ledger.total_sent()


@cache
def traffic(size: int, ranks: int = 4) -> tuple[float, float, float, float]:
    """Bytes of a rank in a step with `size` rows: tensor parallel, its formula, stage 3, its formula."""
    stage3 = sum(run_world(_stage3, ranks, size))
    mine = sum(run.sent for run in measured(ranks, CONFIG, size))
    formula = tensor_parallel_sent(CONFIG.layers, size * CONFIG.context, CONFIG.width, ranks)
    zero = zero_sent(3, [p.numel() for p in GPT(CONFIG).parameters()], ranks)
    return mine / ranks, formula / ranks, stage3 / ranks, zero / ranks


def crossing() -> str:
    """What a rank of four sends in a step as the batch grows, beside stage 3 on the same four."""
    lines: list[list[object]] = [["tokens", "tensor parallel", "stage 3"]]
    for size in (1, 2, 4, 8):
        mine, _, stage3, _ = traffic(size)
        lines.append([size * CONFIG.context, f"{mine:,.0f}", f"{stage3:,.0f}"])
    return columns(lines)


def diary() -> str:
    """What rank 0 of four did in a step of one block."""
    return diaries([measured(4, SMALL)[0].events]).removeprefix("rank 0\n")


def bill() -> str:
    """What `check` shows at its end: bytes of your file's step beside the formula."""
    runs = measured(4, SMALL)
    kinds, sent = _formula(4, SMALL, 2)
    numel = sum(p.numel() for p in GPT(SMALL).parameters())
    lines = [f"your tensor parallelism with 4 ranks and {numel:,} parameters, bytes:"]
    for kind, formula in kinds.items():
        lines.append(f"  {kind + ' on each rank':<28}{runs[0].held[kind]:>12,}   formula {formula:>12,}")
    total = sum(run.sent for run in runs)
    lines.append(f"  {'sent by all in a step':<28}{total:>12,}   formula {sent:>12,}")
    return "\n".join([*lines, "", "one step, rank by rank (bytes):", diaries([run.events for run in runs])])


def watched(comm: Comm, watcher: Any) -> None:
    """What `watch` shows line by line: a step of a model with one block."""
    config = GPTConfig(context=4, layers=1, width=8)
    watcher.trainer = trainer = TensorParallel(GPT(config), comm, max_grad_norm=1.0)
    watcher.phase = "forward"
    loss = trainer.model(*rows(config, 1))
    watcher.phase = "backward"
    trainer.backward(loss)
    watcher.phase = "update"
    trainer.step()


def _over(plot: Any, xs: Sequence[float], ys: Sequence[float], name: str, **style: Any) -> None:
    plot.plot(list(xs), list(ys), label=name, **style)


def main(world: int = 4) -> None:
    """Print what was measured, and plot it."""
    print(f"{parity()}\n\n{table()}\n\nalive after forward beside the parameters\n{uncut()}\n")
    print(f"bytes that a rank of four sends in a step\n{crossing()}")
    figure, (left, middle, right) = new_figure(3)
    ranks = [n for n in RANKS if n <= max(2, world)]
    numel = sum(p.numel() for p in GPT(CONFIG).parameters())
    got = [sum(measured(n)[0].held.values()) / numel for n in ranks]
    said = [sum(_formula(n, CONFIG, 2)[0].values()) / numel for n in ranks]
    _over(left, ranks, got, "measured", marker="o", linestyle="", color=VIOLET)
    _over(left, ranks, said, "formula", linestyle="--", color="black")
    _over(left, ranks, [16 / n for n in ranks], "if all were cut", linestyle=":", color="black")
    left.set_xticks(ranks)
    label(left, "A rank holds", "ranks", "bytes per parameter")
    sizes = (1, 2, 4, 6, 8)
    tokens = [size * CONFIG.context for size in sizes]
    found = [traffic(size) for size in sizes]
    for at, name, marker, colour in ((0, "tensor parallel", "o", VIOLET), (2, "stage 3", "s", BROWN)):
        _over(middle, tokens, [f[at] / 1e3 for f in found], name, marker=marker, linestyle="", color=colour)
        dashed = "formula" if at == 0 else None
        middle.plot(tokens, [f[at + 1] / 1e3 for f in found], "--", color="black", label=dashed)
    label(middle, "A rank of four sends in a step", "tokens in the batch", "kB")
    alive = [measured(n)[0].activations / (2 * CONFIG.context) / 1e3 for n in ranks]
    _over(right, ranks, alive, "measured", marker="o", linestyle="", color=VIOLET)
    _over(right, ranks, [alive[0] / n for n in ranks], "if all were cut", linestyle=":", color="black")
    right.set_xticks(ranks)
    label(right, "Alive after forward, beside the weights", "ranks", "kB for a token")
    save(figure, 8)


if __name__ == "__main__":
    main()
