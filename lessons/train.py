"""`python -m lessons demo`: a small GPT trained at every stage on real processes, as a table and a picture.

Every process is one rank, rank 0 talks. The rows come from `lessons.rows`. The processes are started by
torch.multiprocessing and meet in a file: that needs no port, no shell, and works on Windows, whose torch has
not always what torchrun needs there (libuv).
"""

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lessons import bill, interrupt, plots, tables
from lessons.bill import Bill
from lessons.registry import ROOT
from lessons.rows import ROWS, Row
from lessons.tables import print_table
from zero_min.comm import Comm
from zero_min.dist_comm import DistComm
from zero_min.gpt import GPT, GPTConfig, batch, load_text

CONFIG = GPTConfig()
BATCH = 4
PICTURE = ROOT / "build" / "demo.png"
DISAGREE = 1  # the exit status if a measured number is not the formula's


def train(comm: Comm, row: Row, steps: int, progress: Progress | None) -> tuple[float, int]:
    """Train one row; returns the last loss averaged over ranks, and the bytes this rank sent."""
    text = load_text()
    generator = torch.Generator().manual_seed(comm.rank)
    model = GPT(CONFIG)
    trainer = row.trainer(model, comm, 1.5e-3, steps)
    task = progress.add_task(row.name, total=steps, loss="", speed="") if progress else None
    begin, last = time.perf_counter(), torch.zeros(())
    comm.ledger.clear_traffic()
    for step in range(steps):
        trainer.zero_grad()
        loss = model(*batch(text, BATCH, CONFIG.context, generator))
        trainer.backward(loss)
        trainer.step()
        last = loss.detach().clone()
        if progress is not None and task is not None:
            tokens = comm.world_size * BATCH * CONFIG.context * (step + 1)
            speed = tokens / (time.perf_counter() - begin)
            progress.update(task, advance=1, loss=f"rank 0's loss {last:.4f}", speed=f"{speed:,.0f} tokens/s")
    sent = comm.ledger.total_sent()
    return float(comm.all_reduce(last) / comm.world_size), sent


def run_row(comm: Comm, row: Row, steps: int, progress: Progress | None) -> tuple[Bill, float]:
    """Measure what every rank holds in a few steps, then train, and measure what every rank sends."""
    mine = bill.measure_rank(comm, row, CONFIG)
    loss, sent = train(comm, row, steps, progress)
    ranks: list[Any] = [None] * comm.world_size
    dist.all_gather_object(ranks, replace(mine, sent=sent))
    return bill.compare(replace(row, steps=steps), ranks), loss


def show(console: Console, bills: Sequence[Bill], losses: Sequence[float]) -> bool:
    """The table: loss, bytes held and sent against the formula. Returns whether all agree."""
    ranks, numel = len(bills[0].ranks), bills[0].numel
    table = [["", "loss", "held", "formula", "sent", "formula", "integers"]]
    for each, loss in zip(bills, losses, strict=True):
        held = (each.held, bill.on_device(each.formula_held))
        sent = (each.sent, each.formula_sent / each.row.steps)
        cells = [f"{n / numel:.3f}" for n in held] + [f"{n / ranks / numel:.3f}" for n in sent]
        table.append([each.row.name, f"{loss:.4f}", *cells, "equal" if each.exact() else "DIFFERENT"])
    print_table(table, f"GPT with {numel:,} parameters on {ranks} ranks, bytes per parameter", right=True)
    console.print("loss: of the last step, mean over the ranks")
    console.print("held: on one rank's device between steps; sent: by one rank in a step, mean over the run.")
    console.print("The formulas, the papers' with all padding and scales, are in zero_min/formula.py.")
    rows = zip(bills, losses, strict=True)
    stages = {f"{loss:.4f}" for each, loss in rows if re.fullmatch(r"stage \d", each.row.name)}
    fine = len(stages) == 1 and all(each.exact() for each in bills)
    console.print("All stages end at the same loss." if len(stages) == 1 else f"The stages DIFFER: {stages}")
    return fine


def demo(world: int = 2, steps: int = 100, out: Path = PICTURE) -> int:
    """Measure, train and report every row on `world` processes; 0 if all agree with the formulas."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with interrupt.ignored():  # by ranks that are still importing torch
                given = (world, Path(folder) / "meet", steps, out)
                ranks: Any = mp.spawn(one_rank, given, world, join=False, daemon=True)  # type: ignore[no-untyped-call]
            while not ranks.join():
                pass
        except KeyboardInterrupt:
            for process in ranks.processes:
                process.kill()
            raise
        except mp.ProcessExitedException as ended:
            if ended.exit_code != DISAGREE:
                raise
            return DISAGREE
    return 0


def one_rank(rank: int, world: int, meet: Path, steps: int, out: Path) -> None:
    """What each process does. It meets the others in a file."""
    interrupt.end_silently()
    torch.set_num_threads(1)  # processes must not fight for the cores
    limit = timedelta(seconds=60)
    store = dist.FileStore(str(meet), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    comm = DistComm(check=False)
    console = tables.console()
    columns = [TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[speed]}")]
    losses, bills = [], []
    with Progress(*columns, console=console, disable=rank != 0) as progress:
        for row in ROWS:
            each, loss = run_row(comm, row, steps, progress if rank == 0 else None)
            bills.append(each)
            losses.append(loss)
    fine = True
    if rank == 0:
        fine = show(console, bills, losses)
        out.parent.mkdir(parents=True, exist_ok=True)
        plots.save_bills(bills, out)
        console.print(f"picture: {out}")
    comm.close()
    sys.exit(0 if fine else DISAGREE)
