"""Step 0, measured: what three optimizers remember, and a bill that more ranks do not lower.

Run it with `python -m lessons run 0`.
"""

from functools import cache

import torch
from torch import Tensor, nn

from lessons.bill import KINDS, Bill, measure
from lessons.cells import columns, run_cell
from lessons.colours import GRADIENTS, OPTIMIZER, PARAMETERS
from lessons.plots import label, new_figure, save
from lessons.rows import ROWS
from zero_min import Adam, AdamW


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(0, "Run it")


def broken() -> str:
    """The error of the lesson's broken cell."""
    return run_cell(0, "Break it")


def _torch_optimizers() -> list[tuple[str, nn.Linear, torch.optim.Optimizer]]:
    """Three optimizers after one step on a linear layer of 3 x 5 weights."""
    made: list[tuple[str, nn.Linear, torch.optim.Optimizer]] = []
    for name in ("SGD", "SGD, momentum 0.9", "Adam"):
        layer = nn.Linear(5, 3, bias=False)
        optimizer: torch.optim.Optimizer
        if name == "Adam":
            optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9 * ("momentum" in name))
        layer(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        made.append((name, layer, optimizer))
    return made


def _remembered(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors that are as large as the weight."""
    state = optimizer.state[layer.weight]
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == layer.weight.shape}


def optimizer_states() -> str:
    """What torch's own optimizers keep for one small weight, side by side."""
    rows: list[list[object]] = [["optimizer", "keeps for the weight", "numbers", "with the weight"]]
    for name, layer, optimizer in _torch_optimizers():
        state = _remembered(layer, optimizer)
        kept = ", ".join(f"{k} {list(v.shape)}" for k, v in state.items()) or "nothing"
        numbers, weight = sum(v.numel() for v in state.values()), layer.weight.numel()
        rows.append([name, kept, numbers, f"{weight + numbers} = {1 + numbers // weight} x {weight}"])
    return columns(rows)


def bias_correction() -> str:
    """Adam's first average under a gradient that is always 1, before and after its correction."""
    p = torch.zeros(1)
    adam = Adam([{"params": [p]}])
    rows: list[list[object]] = [["step", "m", "1 - 0.9^t", "m corrected"]]
    for t in (1, 2, 3, 10, 30):
        while adam.steps < t:
            p.grad = torch.ones(1)
            adam.step()
        m = float(adam.m[p])
        rows.append([t, f"{m:.3f}", f"{1 - 0.9**t:.3f}", f"{m / (1 - 0.9**t):.3f}"])
    return columns(rows)


def decays() -> str:
    """One step from weight 1 with gradient 0 and decay: Adam's pull is rescaled, AdamW's is not."""
    rows: list[list[object]] = [["weight_decay", "Adam", "AdamW"]]
    for decay in (0.001, 0.01, 0.1):
        moved: list[object] = []
        for optimizer in (Adam, AdamW):
            p = torch.ones(1)
            p.grad = torch.zeros(1)
            optimizer([{"params": [p]}], lr=0.1, weight_decay=decay).step()
            moved.append(f"{float(p):.4f}")
        rows.append([decay, *moved])
    return columns(rows)


@cache
def _bills(world: int) -> dict[int, Bill]:
    return {n: measure(ROWS[0], n) for n in (1, 2, 4, 8) if n <= world}


def more_ranks(world: int = 4) -> str:
    """Stage 0's bytes per parameter on 1, 2, ... `world` ranks."""
    rows: list[list[object]] = [["ranks", *KINDS, "held", "formula", "sent", "formula"]]
    for n, bill in _bills(world).items():
        numbers = [bill.ranks[0].held[kind] for kind in KINDS]
        numbers += [bill.held, sum(bill.formula_held.values())]
        cells = [number / bill.numel for number in numbers]
        cells += [bill.sent / n / bill.numel, 8 * (n - 1) / n]
        rows.append([n, *(f"{cell:.2f}" for cell in cells)])
    return columns(rows)


def main(world: int = 4) -> None:
    """Measure three optimizers' states, and stage 0 on 1, 2, ... `world` ranks; print and plot both."""
    print(optimizer_states(), "\n")
    print(more_ranks(world))
    figure, (left, right) = new_figure(2)
    names, sizes = [], []
    for name, layer, optimizer in _torch_optimizers():
        names.append(name.replace(", ", ",\n"))
        sizes.append(sum(t.nbytes for t in _remembered(layer, optimizer).values()) / layer.weight.numel())
    left.bar(names, sizes, color=OPTIMIZER, label="optimizer state")
    left.axhline(8, linestyle="--", color="black", label="two fp32 averages: 8")
    label(left, "What an optimizer remembers", "optimizer", "bytes per parameter")
    bills = _bills(world)
    below = [0.0] * len(bills)
    for kind, colour in zip(KINDS, (PARAMETERS, GRADIENTS, OPTIMIZER), strict=True):
        heights = [bill.ranks[0].held[kind] / bill.numel for bill in bills.values()]
        right.bar([str(n) for n in bills], heights, bottom=below, color=colour, label=kind)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    right.axhline(16, linestyle="--", color="black", label="formula: 16")
    label(right, "Stage 0: more ranks, the same bill", "ranks", "bytes per parameter on each rank")
    right.set_ylim(0, 24)
    right.legend(fontsize="small", ncols=2, loc="upper center")  # above the bars
    save(figure, 0)


if __name__ == "__main__":
    main()
