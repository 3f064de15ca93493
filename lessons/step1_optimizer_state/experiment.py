"""Step 1, measured: Adam's state shrinks with the ranks, and the traffic stays what it was.

Run it with `python -m lessons run 1`.
"""

from functools import cache

import torch
from torch import nn

from lessons.bill import Bill, measure
from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.plots import label, new_figure, save
from lessons.rows import ROWS
from zero_min import Stage0, Stage1, run_world
from zero_min.comm import Comm
from zero_min.stage1 import flatten_dense_tensors_aligned, get_data_parallel_partitions, round_robin_reorder


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(1, "Run it")


def broken() -> str:
    """The errors of the lesson's broken cell."""
    return run_cell(1, "Break it")


def dealt() -> str:
    """Five small tensors through the three layout functions, for two ranks."""
    tensors = [torch.full((size,), float(name)) for name, size in enumerate([3, 2, 1, 4, 1])]
    ordered, new_position = round_robin_reorder(tensors, 2)
    flat = flatten_dense_tensors_aligned(ordered, 2)

    def names(values: torch.Tensor) -> str:
        return " ".join(str(int(value)) for value in values)

    lines = [
        f"in the order of the model   {' | '.join(names(t) for t in tensors)}",
        f"dealt to two ranks          {' | '.join(names(t) for t in ordered)}",
        f"where tensor 0..4 went      {new_position}",
        f"flat, padded to {flat.numel()}          {names(flat)}",
    ]
    for rank, part in enumerate(get_data_parallel_partitions(flat, 2)):
        lines.append(f"slice of rank {rank}             {names(part)}")
    return "\n".join(lines)


def near_equal() -> str:
    """How ten elements are cut for one to four ranks, and what padding adds."""
    rows: list[list[object]] = [["ranks", "cut as it is", "padded first"]]
    for ranks in (2, 3, 4):
        ten = torch.zeros(10)
        as_it_is = [part.numel() for part in get_data_parallel_partitions(ten, ranks)]
        padded = get_data_parallel_partitions(flatten_dense_tensors_aligned([ten], ranks), ranks)
        rows.append([ranks, as_it_is, [part.numel() for part in padded]])
    return columns(rows)


def _forgetful(comm: Comm) -> list[float]:
    """One step of a trainer that never gathers; the first weights it ends with."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    trainer = Stage1(model, comm, lr=0.1)
    trainer.backward(model(torch.ones(1, 4)).sum())
    trainer.reduce_gradients()
    trainer.optimizer.step()  # and no trainer.gather_parameters()
    return [round(value, 2) for value in model.weight.flatten().tolist()]


def forgotten_gather() -> str:
    """The weights of two ranks after a step without its all-gather."""
    return "\n".join(f"rank {rank}: {weights}" for rank, weights in enumerate(run_world(_forgetful, 2)))


def _regression(comm: Comm, trainer: type[Stage0 | Stage1], dtype: torch.dtype) -> torch.Tensor:
    """Three steps on this rank's share of eight rows; the weights they end with."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 6, generator=generator, dtype=dtype).chunk(comm.world_size)[comm.rank]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    trained = trainer(model, comm, lr=0.1)
    for _ in range(3):
        trained.zero_grad()
        trained.backward((model(rows) - rows.sum(1, keepdim=True)).square().mean())
        trained.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same_maths() -> str:
    """Stage 1 on four ranks against stage 0 on four, and against one process with the whole batch."""
    rows: list[list[object]] = [["stage 1, 4 ranks, against", "dtype", "bit-equal", "within 1e-12"]]
    for name, trainer, world in (("stage 0, 4 ranks", Stage0, 4), ("one process", Stage0, 1)):
        for dtype in (torch.float32, torch.float64):
            mine = run_world(_regression, 4, Stage1, dtype)[0]
            other = run_world(_regression, world, trainer, dtype)[0]
            close = float((mine - other).abs().max()) < 1e-12
            answers = ["yes" if answer else "no" for answer in (torch.equal(mine, other), close)]
            rows.append([name, str(dtype).removeprefix("torch."), *answers])
    return columns(rows)


@cache
def _bills(world: int) -> dict[int, tuple[Bill, Bill]]:
    return {n: (measure(ROWS[0], n), measure(ROWS[1], n)) for n in (1, 2, 4, 8) if n <= world}


def more_ranks(world: int = 8) -> str:
    """Bytes per parameter on 1, 2, ... `world` ranks, in stages 0 and 1, beside the formulas."""
    rows: list[list[object]] = [["ranks", "held 0", "held 1", "8 + 8/N", "sent 0", "sent 1", "8 (N-1)/N"]]
    for n, pair in _bills(world).items():
        cells = [bill.held / bill.numel for bill in pair] + [8 + 8 / n]
        cells += [bill.sent / n / bill.numel for bill in pair] + [8 * (n - 1) / n]
        rows.append([n, *(f"{cell:.2f}" for cell in cells)])
    return columns(rows)


def main(world: int = 8) -> None:
    """Measure stage 1 on 1, 2, ... `world` ranks against 8 + 8/N; print and plot it."""
    print("bytes per parameter, held by the fullest rank and sent by the mean rank, in stages 0 and 1")
    print(more_ranks(world))
    bills = _bills(world)
    worlds = list(bills)
    held = [[pair[stage].held / pair[stage].numel for pair in bills.values()] for stage in (0, 1)]
    sent = [[pair[stage].sent / n / pair[stage].numel for n, pair in bills.items()] for stage in (0, 1)]
    figure, (left, right) = new_figure(2)
    left.plot(worlds, held[0], "s-", color=BROWN, label="stage 0, measured")
    left.plot(worlds, held[1], "o", color=VIOLET, label="stage 1, measured")
    left.plot(worlds, [8 + 8 / n for n in worlds], "--", color="black", label="formula: 8 + 8/N")
    left.axhline(8, linestyle=":", color=OLIVE, label="parameters and gradients: 8")
    label(left, "Held", "ranks N", "bytes per parameter on each rank")
    right.plot(worlds, sent[0], "s", color=BROWN, markersize=10, label="stage 0, measured")
    right.plot(worlds, sent[1], "o", color=VIOLET, label="stage 1, measured")
    right.plot(worlds, [8 * (n - 1) / n for n in worlds], "--", color="black", label="formula: 8 (N-1)/N")
    label(right, "Sent in a step", "ranks N", "bytes per parameter from each rank")
    save(figure, 1)


if __name__ == "__main__":
    main()
