"""What an asynchronous save costs the steps after it, and how soon a killed run trains again.

    python -m tests.bench.recovery --directory . --size 125M --rounds 3

Two gloo ranks with one thread each, in fp32: zero_full at a stage of ZeRO, and FSDP2 whose state is saved by
torch.distributed.checkpoint (`async_save`). Each round visits both, in an order that rotates.

`steps`: a round takes ten steps, begins an asynchronous save, and takes ten more. "after / before" is the
time of the ten steps after the save's call has returned over the ten before; the call itself stands by
itself.

`kill`: new processes build the model and take a step, save it, and are killed (SIGKILL) when the save is on
the disk. The page cache is asked to forget the files. "kill to step": new processes start at once, and the
time ends when the slower rank has loaded the checkpoint and taken a step. "save to step" adds the save that
was waited for before the kill. The last line is JSON.
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from tests.bench import checkpoint, interleave, peers
from tests.bench.checkpoint_rows import TAG, forget_all, remove
from tests.bench.interleave import Ratio, Series
from tests.bench.peers import Setup
from tests.bench.step_time import SIZES, leave_with_parent
from tests.worlds import Pool
from zero_min.gpt import batch, load_text

WORLD, STEPS = 2, 10
OURS, DCP = "zero_full", "FSDP2 + DCP"
BEFORE, CALL, AFTER, WRITTEN = "before", "call", "after", "written"
STARTED, SAVED = "kill to step", "save"
STALL_TARGET, KILL_TARGET_S = 1.02, 10.0


class Run(ABC):
    """A model that trains, and how it is saved and loaded."""

    def __init__(self, trainee: peers.Trainee, length: int) -> None:
        self.trainee = trainee
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.data = batch(load_text(), 1, length, generator)

    def step(self) -> None:
        """One step of the same data."""
        self.trainee.backward(*self.data)
        self.trainee.update()

    @abstractmethod
    def begin_save(self, folder: Path) -> None:
        """Return when training may go on."""

    @abstractmethod
    def end_save(self) -> None:
        """Return when the checkpoint is on the disk."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Into the state that is there."""


class OursRun(Run):
    """zero_full."""

    def begin_save(self, folder: Path) -> None:
        """Copy, and let a thread write."""
        self.trainee.owner.save_checkpoint(folder, TAG, asynchronous=True)

    def end_save(self) -> None:
        """Wait for the thread."""
        self.trainee.owner.wait_for_checkpoint()

    def load(self, folder: Path) -> None:
        """Verify, then read."""
        self.trainee.owner.load_checkpoint(folder, TAG)


class DcpRun(Run):
    """FSDP2 and torch.distributed.checkpoint."""

    ranks: Any = None

    def _state(self) -> dict[str, Any]:
        model, step = self.trainee.owner
        values, state = get_state_dict(model, step.optimizer)
        return {"model": values, "optimizer": state}

    def begin_save(self, folder: Path) -> None:
        """Copy, and let a thread write."""
        if self.ranks is None:  # not the group of the training, which goes on meanwhile
            self.ranks = dist.new_group(backend="gloo")
        self.saving: Any = async_save(self._state(), checkpoint_id=folder, process_group=self.ranks)

    def end_save(self) -> None:
        """Wait for the thread."""
        self.saving.result()

    def load(self, folder: Path) -> None:
        """In place."""
        model, step = self.trainee.owner
        state = self._state()
        dcp_load(state, checkpoint_id=folder)
        set_state_dict(
            model, step.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


BUILDERS: dict[str, tuple[type[Run], Callable[[int], Callable[[Setup], peers.Trainee]]]] = {
    OURS: (OursRun, peers.zero_full),
    DCP: (DcpRun, lambda stage: peers.fsdp2),
}


@dataclass(frozen=True)
class Plan(checkpoint.Plan):
    """One run."""

    length: int = 64  # tokens in a step of a rank
    rows: tuple[str, ...] = tuple(BUILDERS)


@dataclass
class Found:
    """Seconds of each row, by what was timed."""

    steps: dict[str, dict[str, Series]] = field(default_factory=dict)
    kills: dict[str, dict[str, Series]] = field(default_factory=dict)


def built(name: str, plan: Plan) -> Run:
    """A row's model after a step, which makes the optimizer's state."""
    alone = [dist.new_group([one]) for one in range(WORLD)][dist.get_rank()]
    setup = Setup(SIZES[plan.size], torch.float32, WORLD, alone, bucket=5_000_000, overlap=False)
    kind, build = BUILDERS[name]
    return kind(build(plan.stage)(setup), plan.length)


# Steps -------------------------------------------------------------------------------------------


def steps_main(_: Any, plan: Plan) -> dict[str, dict[str, Series]]:
    """The life of a rank that saves asynchronously."""
    leave_with_parent()
    runs = {name: built(name, plan) for name in plan.rows}
    found: dict[str, dict[str, Series]] = {
        name: {what: [] for what in (BEFORE, CALL, AFTER, WRITTEN)} for name in runs
    }
    for name, run in runs.items():  # the first save makes memory for the copy
        run.step()
        saved(run, Path(plan.directory) / name)

    def visit(name: str, number: int) -> list[float]:
        run, folder, times = runs[name], Path(plan.directory) / name, found[name]
        timed(run.step)
        times[BEFORE].append(timed(run.step, STEPS))
        times[CALL].append(timed(lambda: run.begin_save(folder)))
        times[AFTER].append(timed(run.step, STEPS))
        times[WRITTEN].append(timed(run.end_save))
        remove(folder)
        if dist.get_rank() == 0:
            here = ", ".join(f"{what} {series[-1][0]:.3f}" for what, series in times.items())
            print(f"round {number + 1}: {name}: {here}", file=sys.stderr)
        return []

    interleave.run(list(runs), plan.rounds, visit)
    return found


def saved(run: Run, folder: Path) -> None:
    """Save, wait, and remove it."""
    run.begin_save(folder)
    run.end_save()
    remove(folder)


def timed(act: Callable[[], object], count: int = 1) -> list[float]:
    """Seconds of calls, which all ranks begin together."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        act()
    return [time.perf_counter() - start]


def measure_steps(plan: Plan, limit: float) -> dict[str, dict[str, Series]]:
    """All ranks' findings as one."""
    pool = Pool()
    try:
        ranks = pool.run(steps_main, WORLD, plan, limit=limit, collective=min(limit, 120))
    finally:
        pool.stop()
    return {
        name: {what: interleave.slowest([rank[name][what] for rank in ranks]) for what in ranks[0][name]}
        for name in ranks[0]
    }


# Kill --------------------------------------------------------------------------------------------

SCRIPT = "from tests.bench.recovery import killed_main; killed_main()"


def killed_main() -> None:
    """The life of one process: save and wait for the kill, or load and take a step.

    Arguments: row, rank, store, what to do, folder, size, stage, length.
    """
    name, rank, store, what, folder, size, stage, length = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=WORLD)
    run = built(name, Plan("", size, int(stage), 1, int(length)))
    if what == "save":
        run.step()
        dist.barrier()
        start = time.perf_counter()
        run.begin_save(Path(folder))
        run.end_save()
        dist.barrier()
        print(time.perf_counter() - start, flush=True)
        signal.pause()
    if name == DCP:
        run.step()  # FSDP2's optimizer has no state to load into before a step
    run.load(Path(folder))
    run.step()
    print(time.time(), flush=True)  # the clock of all processes
    dist.barrier()
    os._exit(0)  # the end of a process is not timed


def killed_once(name: str, plan: Plan, number: int) -> tuple[float, float]:
    """Seconds of the save, and from the start of new processes to their first step."""
    folder = Path(plan.directory) / f"{name} {number}"
    saving = started(name, plan, "save", folder, number)
    save = max(float(process.stdout.readline()) for process in saving if process.stdout)
    for process in saving:
        process.kill()
    for process in saving:
        process.communicate()
    forget_all(folder)
    begin = time.time()
    loading = started(name, plan, "load", folder, number)
    ends = [float(process.communicate()[0]) for process in loading]
    return save, max(ends) - begin


def started(name: str, plan: Plan, what: str, folder: Path, number: int) -> list[subprocess.Popen[str]]:
    """Processes of all ranks."""
    store = Path(plan.directory) / f"store {name} {what} {number}"
    shared = [str(store), what, str(folder), plan.size, str(plan.stage), str(plan.length)]
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, name, str(rank), *shared], stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]


def measure_kills(plan: Plan) -> dict[str, dict[str, Series]]:
    """Every round kills every row."""
    found: dict[str, dict[str, Series]] = {name: {SAVED: [], STARTED: []} for name in plan.rows}

    def visit(name: str, number: int) -> list[float]:
        print(f"kill {number + 1}: {name}", file=sys.stderr)
        save, start = killed_once(name, plan, number)
        found[name][SAVED].append([save])
        found[name][STARTED].append([start])
        return []

    interleave.run(plan.rows, plan.rounds, visit)
    return found


# All ---------------------------------------------------------------------------------------------


def measure(plan: Plan, topics: list[str], limit: float) -> Found:
    """What was asked for."""
    return Found(
        measure_steps(plan, limit) if "steps" in topics else {},
        measure_kills(plan) if "kill" in topics else {},
    )


STEPS_HEAD = ["row", "10 steps before, ms", "the call, ms", "10 steps after, ms", "then waited, ms"]
KILL_HEAD = ["row", "save, s", "kill to step, s", "range", "save to step, s"]


def report(found: Found) -> str:
    """The tables."""
    texts = []
    if found.steps:
        lines = [
            [name, *(f"{1e3 * interleave.middle(row[what]):.0f}" for what in (BEFORE, CALL, AFTER, WRITTEN))]
            for name, row in found.steps.items()
        ]
        texts.append(interleave.table(STEPS_HEAD, lines))
    if found.kills:
        lines = []
        for name, row in found.kills.items():
            low, high = interleave.spread(row[STARTED])
            middle, save = interleave.middle(row[STARTED]), interleave.middle(row[SAVED])
            lines.append(
                [name, f"{save:.2f}", f"{middle:.2f}", f"{low:.2f}-{high:.2f}", f"{save + middle:.2f}"]
            )
        texts.append(interleave.table(KILL_HEAD, lines))
    return "\n\n".join(texts)


def ratios(found: Found) -> list[Ratio]:
    """The steps after over the steps before; a new start over the target, and over the peer's."""
    result = [
        interleave.ratio(
            f"{name}: ten steps after the call / before",
            row[AFTER],
            row[BEFORE],
            STALL_TARGET if name == OURS else None,
        )
        for name, row in found.steps.items()
    ]
    if len(found.steps) == len(BUILDERS):
        ours, theirs = (found.steps[name] for name in (OURS, DCP))
        result.append(interleave.ratio(f"the call: {OURS} / {DCP}", ours[CALL], theirs[CALL]))
    if OURS in found.kills:
        limit = [[KILL_TARGET_S]] * len(found.kills[OURS][STARTED])
        name = f"{OURS}: kill to step / {KILL_TARGET_S:g} s"
        result.append(interleave.ratio(name, found.kills[OURS][STARTED], limit, 1))
    if len(found.kills) == len(BUILDERS):
        whole = {
            name: [[a[0] + b[0]] for a, b in zip(row[SAVED], row[STARTED], strict=True)]
            for name, row in found.kills.items()
        }
        kills = {name: row[STARTED] for name, row in found.kills.items()}
        result.append(interleave.ratio(f"kill to step: {OURS} / {DCP}", kills[OURS], kills[DCP]))
        result.append(interleave.ratio(f"save to step: {OURS} / {DCP}", whole[OURS], whole[DCP]))
    return result


def main() -> None:
    """Measure, print tables, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--size", choices=SIZES, default="125M")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=64, help="tokens in a step of a rank")
    parser.add_argument("--topics", nargs="+", choices=["steps", "kill"], default=["steps", "kill"])
    parser.add_argument("--rows", nargs="+", choices=BUILDERS, default=list(BUILDERS), metavar="ROW")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    asked = parser.parse_args()
    print(interleave.heading())
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        plan = Plan(directory, asked.size, asked.stage, asked.rounds, asked.length, tuple(asked.rows))
        found = measure(plan, asked.topics, asked.limit)
    said = (
        f"{asked.size} parameters, fp32, stage {asked.stage}, {WORLD} ranks, {asked.length} tokens in a step"
    )
    print(f"{said} of a rank\n\n{report(found)}")
    here = ratios(found)
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in here]))
    about: dict[str, object] = {"versions": interleave.versions(), "cpus": os.cpu_count()}
    about |= {"size": asked.size, "stage": asked.stage, "rounds": asked.rounds}
    print("\n" + interleave.json_line(here, **about))


if __name__ == "__main__":
    main()
