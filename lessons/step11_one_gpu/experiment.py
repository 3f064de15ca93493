"""Step 11, measured on one device and recorded: the bill, the allocator and the profiler beside each other.

Run it with `python -m lessons run 11`. It shows the recording in this folder. To make one of a GPU here:
`python -m lessons gpu`.
"""

from typing import Any

from lessons import gpu_report
from lessons.cells import run_cell
from lessons.gpu_report import KEPT, recorded
from lessons.plots import new_figure, save
from zero_min.allocator import MIB, Allocator, Block, block_size, replay
from zero_min.comm import Comm
from zero_min.formula import held

RANKS = 4
NUMEL = 811_264  # of the model in `bill`, which is small
ASKED = [MIB // 2, 3 * MIB, 700, 12 * MIB, -3, 2 * MIB, -4, 5000]  # for `watched`


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(11, "Run it")


def broken() -> str:
    """The error of the lesson's broken cell."""
    return run_cell(11, "Break it")


def whose() -> str:
    """Which device the recording is of, and what was trained there."""
    return f"{gpu_report.whose(recorded())}\n{gpu_report.model(recorded())}"


def levels() -> str:
    """From the formula to the whole card."""
    return f"{gpu_report.levels(recorded())}\n{gpu_report.whose(recorded())}"


def moments() -> str:
    """The allocator's counters during a step."""
    return f"{gpu_report.moments(recorded())}\n{gpu_report.whose(recorded())}"


def at_peak() -> str:
    """Which lines had memory at the peak."""
    return f"{gpu_report.lines_at_peak(recorded())}\n{gpu_report.whose(recorded())}"


def beside_torch() -> str:
    """The replay beside torch's own segments."""
    return f"{gpu_report.beside_torch(recorded())}\n{gpu_report.whose(recorded())}"


def work() -> str:
    """Python's time and the GPU's."""
    return "\n".join([gpu_report.work(recorded()), gpu_report.busy(recorded()), gpu_report.whose(recorded())])


def seconds() -> str:
    """Milliseconds of a step."""
    return f"{gpu_report.seconds(recorded())}\n{gpu_report.whose(recorded())}"


def bill() -> str:
    """What `check` shows at its end: blocks for each rank's bill, and the replay of the recording."""
    kinds = held(2, [NUMEL], RANKS)
    lines = [f"your allocator, for stage 2's tensors of a model with {NUMEL:,} parameters:"]
    for rank in range(RANKS):
        made = Allocator()
        for nbytes in kinds.values():
            made.allocate(nbytes)
        said = sum(kinds.values())
        lines.append(f"  {f'requested by rank {rank}':<34}{made.requested:>12,}   formula {said:>12,}")
    found = list(replay(gpu_report.history(recorded())[0]))
    lines += ["", f"the history that was {gpu_report.whose(recorded())}:"]
    for name in ("requested", "allocated", "reserved"):
        lines.append(f"  {f'the most {name}':<34}{max(getattr(one, name) for one in found):>12,}")
    if gpu_report.has_gpu(recorded()):
        lines.append(
            f"  {'the most that torch reserved':<34}{max(gpu_report.torchs_reserved(recorded())):>12,}"
        )
    return "\n".join(lines)


def watched(comm: Comm, watcher: Any) -> None:
    """What `watch` shows line by line: on each rank the same few requests and frees."""
    watcher.phase = "requests and frees"
    made, blocks = Allocator(), list[Block]()
    for event in ASKED:
        if event >= 0:
            blocks.append(made.allocate(event))
        else:
            made.release(blocks[event])
        comm.barrier()


def fragments(capacity: int = 40) -> str:
    """Where the free bytes of the broken cell's card lie."""
    made = Allocator(capacity * MIB)
    blocks = [made.allocate(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        made.release(block)
    rows = [
        " ".join(f"{size // MIB}{'' if taken else ' free'}" for size, taken in row) for row in made.layout()
    ]
    return "\n".join(rows)


def main(world: int = RANKS) -> None:
    """Print what the recording says, and plot it."""
    found = recorded(KEPT)
    if world != found["about"]["size"]["world"]:
        print(f"the recording has {found['about']['size']['world']} ranks; --world changes nothing here")
    for part in (whose, levels, moments, at_peak, beside_torch, work, seconds):
        print(f"{part()}\n")
    print(f"a block for one byte has {block_size(1)}")
    figure, (left, middle, right) = new_figure(3)
    gpu_report.draw_over_time(left, found, 2)
    left.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    left.set_title("Bytes during one step of stage 2", fontsize=9)
    gpu_report.draw_sums(middle, found)
    gpu_report.draw_timeline(right, found)
    right.set_title("The same step under the profiler", fontsize=9)
    right.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4)
    figure.suptitle(gpu_report.whose(found), fontsize=9)
    save(figure, 11)


if __name__ == "__main__":
    main()
