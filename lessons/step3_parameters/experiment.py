"""Step 3, measured: parameters that come and go, what they cost to fetch, and what is alive meanwhile.

Run it with `python -m lessons run 3`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, SLATE, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import Stage2, Stage3, Stage3Prefetch, run_world
from zero_min.comm import Comm
from zero_min.formula import padded
from zero_min.gpt import GPT, GPTConfig
from zero_min.ledger import held
from zero_min.stage3 import Sliced

LAYERS, WIDTH, ROWS = 10, 56, 8
MICRO_BATCHES = (1, 2, 4)


class KeepWhole(Stage3):
    """Stage 3 that does not release after forward, so that backward finds everything in place."""

    def _after(self, slices: list[Sliced], outputs: list[Tensor]) -> None:
        pass


TRAINERS: dict[str, Callable[..., Stage2 | Stage3]] = {
    "stage 2": partial(Stage2, bucket_size=WIDTH * WIDTH),
    "stage 3": Stage3,
    "stage 3, prefetch": Stage3Prefetch,
    "stage 3, kept whole": KeepWhole,
}


@dataclass(frozen=True)
class Seen:
    """What one rank's ledger saw of one step."""

    numel: int
    sent: int
    held: int
    peak: int
    live: tuple[int, ...]  # at every event


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(3, "Run it")


def broken() -> str:
    """What the cell prints that uses a weight outside its module."""
    return run_cell(3, "Break it on purpose")


def skipped() -> str:
    """The error of the cell in which one rank skips a module."""
    return run_cell(3, "Break it again")


def _chain(layers: int = LAYERS, width: int = WIDTH, bias: bool = False) -> nn.Sequential:
    """Equal layers, each a small part of the model, with the same values on every rank."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1, generator=generator)
    return model


def _train(comm: Comm, name: str, micro_batches: int) -> Seen:
    """One step on the chain of layers; prefetch needs one before that, to write the order down."""
    ledger = comm.ledger
    with ledger.watch():
        model = _chain()
        trainer = TRAINERS[name](model, comm, lr=1e-3)
        for _ in range(1 + (name == "stage 3, prefetch")):
            ledger.clear_traffic()
            trainer.zero_grad()
            ledger.peak = ledger.live()
            for _ in range(micro_batches):
                trainer.backward(model(torch.ones(ROWS, WIDTH)).square().mean() / micro_batches)
            trainer.step()
            ledger.note("done")
        numel = sum(p.numel() for p in model.parameters())
        kinds = sum(held(tensors) for tensors in trainer.holdings().values())
        return Seen(numel, ledger.total_sent(), kinds, ledger.peak, tuple(e.live for e in ledger.events))


@cache
def _seen(name: str, world: int, micro_batches: int = 1) -> list[Seen]:
    return run_world(_train, world, name, micro_batches)


def _each(seen: list[Seen], what: str) -> float:
    """Bytes per parameter: what the fullest rank holds or had alive, or what the mean rank sends."""
    numbers = [getattr(rank, what) for rank in seen]
    worst = sum(numbers) / len(numbers) if what == "sent" else max(numbers)
    return float(worst / seen[0].numel)


def padding() -> str:
    """Zeros that are added when every tensor is cut by itself, and when all are cut as one."""
    sizes = [p.numel() for p in GPT(GPTConfig(context=32, layers=2, width=32)).parameters()]
    rows: list[list[object]] = [["ranks", "elements", "tensor by tensor", "as one piece"]]
    for world in (4, 7, 64):
        by_tensor = padded(sizes, world) - sum(sizes)
        as_one = padded([sum(sizes)], world) - sum(sizes)
        rows.append([world, f"{sum(sizes):,}", by_tensor, as_one])
    return columns(rows)


def _lifecycle(comm: Comm, trainer_class: type[Stage3], layers: int, bias: bool) -> list[str]:
    """Three steps of a chain of layers; what the last one did to their parameters, in order."""
    model = _chain(layers, 4, bias)
    trainer = trainer_class(model, comm)
    said: list[tuple[str, str]] = []

    def overhear(s: Sliced, verb: str, method: Callable[[], None], only_if: bool | None) -> None:
        if only_if is None or s.is_whole == only_if:
            said.append((verb, s.name))
        method()

    for s in trainer.sliced.values():
        heard = (
            ("gather", s.gather, False),
            ("release", s.release, True),
            ("reduce", s.reduce_gradient, None),
        )
        for verb, method, only_if in heard:
            name = "reduce_gradient" if verb == "reduce" else verb
            setattr(s, name, partial(overhear, s, verb, method, only_if))
    if isinstance(trainer, Stage3Prefetch):
        _overhear_prefetch(trainer, said)
    for layer in model:
        name = f"layer {list(model).index(layer)}"
        layer.register_forward_pre_hook(lambda *_, name=name: said.append(("run", name)))
    for _ in range(3):
        trainer.zero_grad()
        said.clear()
        loss = model(torch.ones(1, 4)).sum()
        said.append(("backward", ""))
        trainer.backward(loss)
        trainer.step()
    return _sentences(said)


def _overhear_prefetch(trainer: Stage3Prefetch, said: list[tuple[str, str]]) -> None:
    """Note each gather that is started early, and where it is waited for."""
    start, collect = trainer._start, trainer._collect

    def starts(s: Sliced) -> None:
        said.extend([] if s.is_whole or s in trainer.coming else [("start", s.name)])
        start(s)

    def collects(slices: Sequence[Sliced]) -> None:
        said.extend(("wait", s.name) for s in slices if s in trainer.coming)
        collect(slices)

    trainer._start, trainer._collect = starts, collects  # type: ignore[method-assign]


def _sentences(said: list[tuple[str, str]]) -> list[str]:
    """Neighbours with the same verb share a line."""
    lines: list[tuple[str, list[str]]] = []
    for verb, name in said:
        if lines and lines[-1][0] == verb:
            lines[-1][1].append(name)
        else:
            lines.append((verb, [name]))
    return [f"{verb:<8} {', '.join(names)}".rstrip() for verb, names in lines]


def lifecycle() -> str:
    """One step of two layers on two ranks, as rank 0 lives it."""
    return "\n".join(run_world(_lifecycle, 2, Stage3, 2, True)[0])


def ahead() -> str:
    """The forward of three layers, without and with prefetch, side by side."""
    sides = []
    for trainer_class in (Stage3, Stage3Prefetch):
        lines = run_world(_lifecycle, 2, trainer_class, 3, False)[0]
        sides.append([trainer_class.__name__, *lines[: lines.index("backward")]])
    return "\n".join(f"{a:<22}{b}".rstrip() for a, b in zip_longest(*sides, fillvalue=""))


def refilled() -> str:
    """A view that was made before release reads the right values after the next gather."""

    def body(comm: Comm) -> list[str]:
        s = Sliced("weight", nn.Parameter(torch.arange(6.0).view(2, 3)), comm)
        lines = []
        s.gather()
        saved = s.param.detach().t()  # what a linear layer's backward keeps
        for moment in ("gathered", "released", "gathered again"):
            reads = "" if moment == "released" else f"; the view reads {saved.flatten().tolist()}"
            lines.append(f"{moment:<15} storage of {s.flat.untyped_storage().nbytes():>2} bytes{reads}")
            if s.is_whole:
                s.release()
            else:
                s.gather()
        return lines

    return "\n".join(run_world(body, 2)[0])


class _Uses(nn.Module):
    """Three layers; the middle one is called as often as asked, or under activation checkpointing."""

    def __init__(self, calls: int, recompute: bool) -> None:
        super().__init__()
        self.calls, self.recompute = calls, recompute
        self.first, self.middle, self.last = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        out: Tensor = self.last(x).sum()
        return out


def _gathers(comm: Comm, calls: int, recompute: bool) -> tuple[int, int]:
    model = _Uses(calls, recompute)
    trainer = Stage3(model, comm)
    comm.ledger.clear_traffic()
    trainer.backward(model(torch.ones(1, 8)))
    collectives = [event.what for event in comm.ledger.events]
    return collectives.count("all_gather"), collectives.count("reduce_scatter")


def uses() -> str:
    """Collectives of one micro-batch when the middle of three layers is used in unusual ways."""
    rows: list[list[object]] = [["the middle layer is", "gathers", "reduces"]]
    cases = (("called once", 1, False), ("called twice", 2, False), ("skipped by all", 0, False))
    for name, calls, recompute in (*cases, ("checkpointed", 1, True)):
        rows.append([name, *run_world(_gathers, 2, calls, recompute)[0]])
    return columns(rows)


def working_set(world: int = 4) -> str:
    """Bytes per parameter sent, held between steps, and alive at the peak of a step."""
    rows: list[list[object]] = [["", "sent", "held", "peak", "peak - held"]]
    for name in TRAINERS:
        sent, between, peak = (_each(_seen(name, world), what) for what in ("sent", "held", "peak"))
        rows.append([name, *(f"{number:.2f}" for number in (sent, between, peak, peak - between))])
    return columns(rows)


def micro_batches(world: int = 4) -> str:
    """What each rank sends in a step of several micro-batches, beside the formulas."""
    head: list[object] = ["micro-batches", "stage 2", "4 (m+1)(N-1)/N", "stage 3", "12 m(N-1)/N"]
    rows = [head]
    for m in MICRO_BATCHES:
        two, three = (_each(_seen(name, world, m), "sent") for name in ("stage 2", "stage 3"))
        share = (world - 1) / world
        rows.append([m, *(f"{x:.2f}" for x in (two, 4 * (m + 1) * share, three, 12 * m * share))])
    return columns(rows)


def _worlds(world: int) -> list[int]:
    return [n for n in (1, 2, 4, 8) if n <= world]


def more_ranks(world: int = 4) -> str:
    """What a rank holds between steps on 1, 2, ... `world` ranks, beside 16/N."""
    rows: list[list[object]] = [["ranks", "stage 2", "stage 3", "16/N"]]
    for n in _worlds(world):
        numbers = [_each(_seen(name, n), "held") for name in ("stage 2", "stage 3")] + [16 / n]
        rows.append([n, *(f"{number:.2f}" for number in numbers)])
    return columns(rows)


def _plot_live(plot: Axes, world: int) -> None:
    for name, colour in (("stage 2", BROWN), ("stage 3", VIOLET), ("stage 3, prefetch", SLATE)):
        first = _seen(name, world)[0]
        live = [number / first.numel for number in first.live]
        plot.plot([i / (len(live) - 1) for i in range(len(live))], live, color=colour, label=name)
    plot.axhline(16 / world, linestyle="--", color="black", label=f"formula between steps: 16/{world}")
    label(
        plot,
        f"One step of rank 0 of {world}",
        "events, first gather (0) to done (1)",
        "live bytes per parameter",
    )


def main(world: int = 4) -> None:
    """Print and plot what stage 3 holds, sends and has alive while it works."""
    print(f"bytes per parameter, {LAYERS} layers, {world} ranks\n{working_set(world)}\n")
    print(micro_batches(world), "\n")
    print(more_ranks(world))
    figure, (left, right) = new_figure(2)
    _plot_live(left, world)
    worlds = _worlds(world)
    for name, colour, marker in (("stage 2", BROWN, "s"), ("stage 3", VIOLET, "o")):
        between = [_each(_seen(name, n), "held") for n in worlds]
        right.plot(worlds, between, marker, color=colour, label=f"{name}, held between steps")
    right.plot(worlds, [16 / n for n in worlds], "--", color="black", label="formula: 16/N")
    peaks = [_each(_seen("stage 3", n), "peak") for n in worlds]
    right.plot(worlds, peaks, "^:", color=OLIVE, label="stage 3, peak of a step")
    right.set_xticks(worlds)
    label(right, "Held and needed", "ranks N", "bytes per parameter on each rank")
    save(figure, 3)


if __name__ == "__main__":
    main()
