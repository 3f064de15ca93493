"""`python -m tests.hostile.lasting`: what 50 engines and 500 steps leave behind, as a table for the site."""

import gc
import sys
from pathlib import Path
from typing import Any

import zero_full
from tests.bench.interleave import heading
from tests.hostile.cells import STAGES
from tests.worlds import POOL
from tests.zero_full.runs import Net, config, data
from zero_full.freed_memory import return_freed_memory

CYCLES, STEPS = 50, 500
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    ", overlap_comm": {"overlap_comm": True},
    ", mics_shard_size 1": {"mics_shard_size": 1},
}
Left = tuple[int, int, int]  # open files, threads, MiB


def left() -> Left:
    """What this process holds now."""
    gc.collect()
    return_freed_memory()  # what malloc keeps of it is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))
    return files, threads, pages * 4096 // 2**20


def cycles(comm: Any, stage: int, zero: dict[str, Any], count: int) -> list[Left]:
    """Before the first engine, after the fifth and after the last; each takes a step and ends."""
    found = [left()]
    for number in range(count):
        engine, _, _, _ = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))
        engine.backward(engine(data(0, 0, comm.rank)))
        engine.step()
        engine.destroy()
        if number in (4, count - 1):
            found.append(left())
    return found


def steps(comm: Any, stage: int, zero: dict[str, Any], count: int) -> list[Left]:
    """After the twentieth step and after the last, which a loop in PyTorch's manner has taken."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))
    found = []
    for number in range(count):
        optimizer.zero_grad()
        engine(data(number, 0, comm.rank)).backward()
        optimizer.step()
        if number in (19, count - 1):
            found.append(left())
    engine.destroy()
    return found


def main() -> int:
    """Print it."""
    print(heading())
    print("Of one of two ranks: open files, threads, MiB of memory.\n")
    print(f"| | before | after 5 engines | after {CYCLES} | after 20 steps | after {STEPS} |\n{'|---' * 6}|")
    for stage in STAGES:
        for way, zero in WAYS.items():
            if stage or "mics" not in way:
                parts = (POOL.run(cycles, 2, stage, zero, CYCLES), POOL.run(steps, 2, stage, zero, STEPS))
                cells = [", ".join(map(str, each)) for part in parts for each in part[0]]
                print(f"| stage {stage}{way} | {' | '.join(cells)} |")
    POOL.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
