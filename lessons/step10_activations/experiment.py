"""Step 10, measured: what a forward keeps, what recomputation and offload leave of it, and what they cost.

Run it with `python -m lessons run 10`.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lessons.bill import SMALL, diaries
from lessons.cells import columns, run_cell
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.plots import label, new_figure, save
from zero_min import Stage3, run_world
from zero_min.activations import (
    Meter,
    OffloadActivations,
    best_interval,
    checkpoint,
    in_segments,
)
from zero_min.comm import Comm
from zero_min.formula import (
    FP32,
    kept_by_block,
    kept_for_recomputing,
    kept_while_recomputing,
    offloaded,
)
from zero_min.formula import held as zero_held
from zero_min.gpt import GPT, Block, GPTConfig, batch, load_text
from zero_min.ledger import Event, Ledger, held
from zero_min.offload import Host

CONFIG = GPTConfig(context=16, layers=8, width=32)
ROWS = 2
RANKS = (1, 2, 4)
INTERVALS = (0, 1, 2, 4, 8)  # blocks that are recomputed at a time; 0 keeps everything


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(10, "Run it")


def broken() -> str:
    """The output of the lesson's broken cell."""
    return run_cell(10, "Break it")


class Gauge(Meter):
    """A meter that also knows what is let go: the most bytes that are kept at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """As ever, and look what is alive now."""
        packed, storage = super().pack(tensor), tensor.untyped_storage()
        at = storage.data_ptr()
        if at in self.kept and (at not in self.alive or self.alive[at]() is None):
            self.alive[at] = weakref.ref(storage)
        self.most = max(self.most, self.now())
        return packed

    def now(self) -> int:
        """Bytes that are kept and have not been let go."""
        storages = [ref() for ref in self.alive.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def stream(config: GPTConfig = CONFIG, rows: int = ROWS) -> Tensor:
    """What goes into the first block: (B, T, C)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, config.context, config.width, generator=generator).requires_grad_()


class Trunk(nn.Module):
    """The blocks of a GPT and no more. How often a block has run is counted."""

    def __init__(self, config: GPTConfig, interval: int = 0) -> None:
        super().__init__()
        model = GPT(config)
        self.runs = 0
        for block in model.blocks:
            block.register_forward_pre_hook(self._count)
        if interval:
            in_segments(model, interval)
        self.blocks = model.blocks

    def _count(self, module: nn.Module, arguments: Any) -> None:
        self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C)."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Measured:
    """A forward and a backward of some blocks."""

    kept: int  # bytes after the forward
    most: int  # bytes at once, until the end of backward
    runs: int  # of a block's forward
    flops: int


@cache
def measured(config: GPTConfig = CONFIG, rows: int = ROWS, interval: int = 0) -> Measured:
    """What is kept, and what is computed, with so many blocks recomputed at a time."""
    trunk, x = Trunk(config, interval), stream(config, rows)
    gauge, flops = Gauge(trunk), FlopCounterMode(display=False)
    with gauge, flops:
        y = trunk(x)
        kept = gauge.now()
        y.backward(torch.ones_like(y))
    return Measured(kept, gauge.most, trunk.runs, flops.get_total_flops())


def boundary(config: GPTConfig = CONFIG, rows: int = ROWS) -> int:
    """Bytes that go from one block to the next."""
    return 4 * rows * config.context * config.width


def block(config: GPTConfig = CONFIG, rows: int = ROWS) -> int:
    """Bytes that one block keeps, by the formula."""
    return kept_by_block(rows * config.context, config.width, config.heads)


def growth() -> str:
    """What the blocks keep as batch, context and layers grow, beside the formula and 16 bytes a parameter."""
    deeper, longer = replace(CONFIG, layers=16), replace(CONFIG, context=32)
    cases = {
        "2 rows of 16, 8 layers": (CONFIG, ROWS),
        "4 rows": (CONFIG, 2 * ROWS),
        "rows of 32": (longer, ROWS),
        "16 layers": (deeper, ROWS),
    }
    table: list[list[object]] = [["", "kept by a forward", "formula", "16 bytes a parameter"]]
    for name, (config, rows) in cases.items():
        numel = sum(p.numel() for p in Trunk(config).parameters())
        formula = config.layers * block(config, rows)
        table.append([name, f"{measured(config, rows).kept:,}", f"{formula:,}", f"{16 * numel:,}"])
    return columns(table)


@dataclass(frozen=True)
class RankMeasured:
    """One rank's step at stage 3."""

    held: int  # bytes between steps
    kept: int  # bytes that its forward keeps
    sent: int
    loss: float
    events: tuple[Event, ...]


def _one_step(comm: Comm, config: GPTConfig, interval: int) -> RankMeasured:
    tokens, targets = batch(load_text(), ROWS, config.context, torch.Generator().manual_seed(comm.rank))
    with comm.ledger.watch():
        model = in_segments(GPT(config), interval) if interval else GPT(config)
        trainer = Stage3(model, comm)
        comm.ledger.clear_traffic()
        gauge = Gauge(_blocks(model))
        inside = _around(_blocks(model), gauge)
        comm.ledger.note("forward")
        with inside:
            loss = trainer.model(tokens, targets)
        kept = gauge.now()
        comm.ledger.note("backward")
        trainer.backward(loss)
        value = float(loss.detach())
        del loss
        comm.ledger.note("step")
        trainer.step()
        comm.ledger.note("done")
        ours = sum(held(tensors) for tensors in trainer.holdings().values())
        return RankMeasured(ours, kept, comm.ledger.total_sent(), value, tuple(comm.ledger.events))


def _blocks(model: nn.Module) -> nn.ModuleList:
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    return blocks


@contextmanager
def _around(blocks: nn.ModuleList, gauge: Gauge) -> Iterator[None]:
    """Inside the `with`, the gauge counts what these blocks keep, and nothing before or after them."""

    def enter(module: nn.Module, arguments: Any) -> None:
        gauge.__enter__()

    def leave(module: nn.Module, arguments: Any, output: Tensor) -> None:
        gauge.__exit__()

    hooks = blocks[0].register_forward_pre_hook(enter), blocks[-1].register_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@cache
def ranks(number: int, interval: int = 0, config: GPTConfig = CONFIG) -> list[RankMeasured]:
    """A step at stage 3, each rank with a batch of its own."""
    return run_world(_one_step, number, config, interval)


def uncut() -> str:
    """What a rank holds and keeps at stage 3, on 1, 2 and 4 ranks."""
    sizes = [p.numel() for p in GPT(CONFIG).parameters()]
    table: list[list[object]] = [["ranks", "a rank holds", "formula", "its blocks keep", "formula"]]
    for n in RANKS:
        run = ranks(n)[0]
        formula = sum(zero_held(3, sizes, n, FP32).values())
        kept = CONFIG.layers * block()
        table.append([n, f"{run.held:,}", f"{formula:,}", f"{run.kept:,}", f"{kept:,}"])
    return columns(table)


def traffic() -> str:
    """What four ranks of stage 3 send in a step, and the loss, with so many blocks recomputed at a time."""
    table: list[list[object]] = [["blocks at a time", "all send", "loss of rank 0"]]
    for interval in INTERVALS:
        runs = ranks(4, interval)
        sent = sum(run.sent for run in runs)
        table.append([interval or "none", f"{sent:,}", f"{runs[0].loss:.5f}"])
    return columns(table)


def recomputed() -> str:
    """What is kept and what is run, with 0, 1, 2, 4 and 8 of 8 blocks recomputed at a time."""
    head = ["blocks at a time", "kept after forward", "formula", "at most in backward", "formula", "FLOPs"]
    table: list[list[object]] = [[*head]]
    once = measured().flops
    for interval in INTERVALS:
        run = measured(CONFIG, ROWS, interval)
        after, most = forecast(interval)
        cells = [f"{run.kept:,}", f"{after:,}", f"{run.most:,}", f"{most:,}", f"x {run.flops / once:.3f}"]
        table.append([interval or "none", *cells])
    return columns(table)


def forecast(interval: int, config: GPTConfig = CONFIG, rows: int = ROWS) -> tuple[int, int]:
    """Bytes that are kept after the forward, and at most, by the formula."""
    one, inside = boundary(config, rows), block(config, rows)
    if interval == 0:
        return config.layers * inside, config.layers * inside
    after = kept_for_recomputing(config.layers, interval, one)
    return after, kept_while_recomputing(config.layers, interval, one, inside)


class Selective(Block):
    """A block that recomputes the inside of its two-layer network, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C)."""
        x = x + self.attention(self.norm1(x))
        return x + checkpoint(self.network, x)

    def network(self, x: Tensor) -> Tensor:
        """The second half of a block."""
        up = self.up(self.norm2(x))
        down: Tensor = self.down(nn.functional.gelu(up))
        return down


def choices() -> str:
    """What one block keeps, and how much more is computed, for three choices of what to recompute."""
    x, table = stream(), [["recomputed", "a block keeps", "of all", "FLOPs"]]
    whole, once = 0, 0
    for name, kind, interval in (
        ("nothing", Block, 0),
        ("its network", Selective, 0),
        ("all of it", Block, 1),
    ):
        trunk = Trunk(replace(CONFIG, layers=1))
        trunk.blocks = nn.ModuleList([kind(CONFIG)])
        if interval:
            in_segments(trunk, interval)  # type: ignore[arg-type]
        gauge, flops = Gauge(trunk), FlopCounterMode(display=False)
        with gauge, flops:
            y = trunk(x)
            kept = gauge.now()
            y.backward(torch.ones_like(y))
        whole, once = whole or kept, once or flops.get_total_flops()
        part, more = f"{kept / whole:.0%}", f"x {flops.get_total_flops() / once:.3f}"
        table.append([name, f"{kept:,}", part, more])
    return columns(table)


def root_rule() -> str:
    """The best number of layers at a time, if a layer keeps as much as its input, and if 16 times as much."""
    table: list[list[object]] = [["layers", "keeps 1 x its input", "bytes", "keeps 16 x its input", "bytes"]]
    for layers in (4, 16, 64, 100):
        cells: list[object] = [layers]
        for inside in (1, 16):
            best = best_interval(layers, 1, inside)
            cells += [f"{best} at a time", f"{-(-layers // best) + best * inside} of {layers * inside}"]
        table.append(cells)
    return columns(table)


@dataclass(frozen=True)
class Moved:
    """What offloading costs."""

    down: int
    up: int
    stayed: int


@cache
def moved(config: GPTConfig = CONFIG, rows: int = ROWS, interval: int = 0) -> Moved:
    """A forward whose activations wait on the host, and its backward."""
    ledger, trunk, x = Ledger(), Trunk(config, interval), stream(config, rows)
    hooks = OffloadActivations(trunk, Host(torch.device("cpu"), ledger))
    with ledger.watch():
        with hooks:
            y = trunk(x)
        hooks.flying = None  # the last copy has landed
        down = ledger.moved["device to host"]
        stayed = ledger.live() - y.nbytes - down  # what is alive and not on the host
    y.backward(torch.ones_like(y))
    return Moved(down, ledger.moved["host to device"], stayed)


def link() -> str:
    """Bytes over the link to the host, and what stays: for all activations, or inputs of segments only."""
    table: list[list[object]] = [["", "down", "up", "formula", "stays on the device"]]
    tokens, one = ROWS * CONFIG.context, boundary()
    for name, interval, formula in (
        ("all activations", 0, CONFIG.layers * offloaded(tokens, CONFIG.width)),
        ("the inputs of 8 segments", 1, kept_for_recomputing(CONFIG.layers, 1, one)),
    ):
        run = moved(CONFIG, ROWS, interval)
        table.append([name, f"{run.down:,}", f"{run.up:,}", f"{formula:,}", f"{run.stayed:,}"])
    return columns(table)


def parity() -> str:
    """Whether gradients are those of the plain blocks, to the last bit."""
    plain = _gradients(Trunk(CONFIG))
    table: list[list[object]] = [["", "gradients equal to the bit"]]
    for interval in INTERVALS[1:]:
        same = all(map(torch.equal, plain, _gradients(Trunk(CONFIG, interval))))
        table.append([f"{interval} recomputed at a time", "yes" if same else "no"])
    trunk = Trunk(CONFIG)
    with OffloadActivations(trunk, Host(torch.device("cpu"), Ledger())):
        y = trunk(stream())
    y.backward(torch.ones_like(y))
    same = all(map(torch.equal, plain, (p.grad for p in trunk.parameters())))
    table.append(["offloaded", "yes" if same else "no"])
    return columns(table)


def _gradients(trunk: Trunk) -> list[Tensor]:
    y = trunk(stream())
    y.backward(torch.ones_like(y))
    return [p.grad for p in trunk.parameters() if p.grad is not None]


def diary() -> str:
    """What rank 0 of four did in a step at stage 3 that recomputes its one block."""
    return diaries([ranks(4, 1, SMALL)[0].events]).removeprefix("rank 0\n")


def bill() -> str:
    """What `check` shows at its end: what is kept, run and copied with your file, beside the formula."""
    config = replace(SMALL, layers=4)
    lines = [f"your activations: {config.layers} blocks, {ROWS * config.context} tokens, bytes:"]
    for interval in (0, 1, 2):
        run = measured(config, ROWS, interval)
        after, most = forecast(interval, config)
        how = f"{interval} at a time" if interval else "all kept"
        lines.append(f"  {how + ', after forward':<34}{run.kept:>12,}   formula {after:>12,}")
        lines.append(f"  {how + ', at most':<34}{run.most:>12,}   formula {most:>12,}")
    for interval in (0, 2):
        run, said = measured(config, ROWS, interval), config.layers * (2 if interval else 1)
        how = "forwards of blocks" + (", recomputed" if interval else "")
        lines.append(f"  {how:<34}{run.runs:>12,}   formula {said:>12,}")
    said = config.layers * offloaded(ROWS * config.context, config.width)
    for name, found in zip(("to the host", "and back"), (moved(config).down, moved(config).up), strict=True):
        lines.append(f"  {'offloaded, ' + name:<34}{found:>12,}   formula {said:>12,}")
    runs = ranks(4, 1, SMALL)
    for rank, one in enumerate(runs):
        kept = kept_for_recomputing(SMALL.layers, 1, boundary(SMALL))
        lines.append(f"  {f'kept by rank {rank} at stage 3':<34}{one.kept:>12,}   formula {kept:>12,}")
    text = "a step at stage 3 that recomputes its one block, rank by rank (bytes):"
    return "\n".join([*lines, "", text, diaries([run.events for run in runs])])


def watched(comm: Comm, watcher: Any) -> None:
    """What `watch` shows line by line: a step at stage 3 that recomputes two blocks, one at a time."""
    config = GPTConfig(context=4, layers=2, width=8)
    watcher.trainer = trainer = Stage3(in_segments(GPT(config), 1), comm)
    tokens, targets = batch(load_text(), 1, config.context, torch.Generator().manual_seed(comm.rank))
    watcher.phase = "forward"
    loss = trainer.model(tokens, targets)
    watcher.phase = "backward"
    trainer.backward(loss)
    del loss
    watcher.phase = "update"
    trainer.step()


def seconds(interval: int, config: GPTConfig, rows: int, repeats: int = 5) -> float:
    """The fastest of some forwards and backwards, by the clock."""
    trunk, found = Trunk(config, interval), []
    for _ in range(repeats):
        x, begin = stream(config, rows), time.perf_counter()
        trunk(x).sum().backward()
        found.append(time.perf_counter() - begin)
    return min(found)


def main(world: int = 4) -> None:
    """Print what was measured, and plot it."""
    print(
        f"{parity()}\n\n{growth()}\n\n{uncut()}\n\n{traffic()}\n\n{recomputed()}\n\n{choices()}\n\n{root_rule()}\n\n{link()}\n"
    )
    large = GPTConfig(context=128, layers=4, width=128)
    plain, again = (seconds(interval, large, 4) for interval in (0, 1))
    print("by the clock, 4 blocks of width 128, 512 tokens: recomputing takes", end=" ")
    print(f"{again / plain:.2f} times as long (it varies with what else this machine does)")
    figure, (left, middle, right) = new_figure(3)
    counts = [n for n in RANKS if n <= max(2, world)]
    for name, values, marker, colour in (
        ("held between steps", [ranks(n)[0].held / 1e3 for n in counts], "s", BROWN),
        ("kept by a forward", [ranks(n)[0].kept / 1e3 for n in counts], "o", VIOLET),
    ):
        left.plot(counts, values, marker, color=colour, label=name)
    sizes = [p.numel() for p in GPT(CONFIG).parameters()]
    formula = [sum(zero_held(3, sizes, n, FP32).values()) / 1e3 for n in counts]
    left.plot(counts, formula, "--", color="black", label="formula")
    left.plot(counts, [CONFIG.layers * block() / 1e3] * len(counts), "--", color="black")
    left.set_xticks(counts)
    label(left, "A rank at stage 3", "ranks", "kB")
    _against_tokens(middle)
    _against_interval(right)
    save(figure, 10)


def _against_tokens(plot: Any) -> None:
    rows = (1, 2, 4, 8)
    tokens = [CONFIG.context * n for n in rows]
    for name, interval, marker, colour in (("all kept", 0, "o", VIOLET), ("recomputed", 1, "s", BROWN)):
        found = [measured(CONFIG, n, interval).most / 1e3 for n in rows]
        plot.plot(tokens, found, marker, color=colour, label=name)
        said = [forecast(interval, CONFIG, n)[1] / 1e3 for n in rows]
        plot.plot(tokens, said, "--", color="black", label="formula" if interval else None)
    label(plot, "Kept at most, 8 blocks", "tokens in the batch", "kB")


def _against_interval(plot: Any) -> None:
    deep = replace(CONFIG, layers=16)
    steps = (1, 2, 4, 8, 16)
    found = [measured(deep, 1, each) for each in steps]
    plot.plot(steps, [run.kept / 1e3 for run in found], "s", color=OLIVE, label="after forward")
    plot.plot(steps, [run.most / 1e3 for run in found], "o", color=VIOLET, label="at most in backward")
    for at in (0, 1):
        said = [forecast(each, deep, 1)[at] / 1e3 for each in steps]
        plot.plot(steps, said, "--", color="black", label=None if at else "formula")
    plot.axhline(measured(deep, 1).kept / 1e3, linestyle=":", color="black", label="nothing recomputed")
    plot.set_xscale("log", base=2)
    plot.set_xticks(steps, [str(each) for each in steps])
    label(plot, "16 blocks", "blocks recomputed at a time", "kB")
    plot.legend(fontsize="small", loc="center left")


if __name__ == "__main__":
    main()
