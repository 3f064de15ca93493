"""Step 2, measured: when gradients disappear, what a bucket costs, and what micro-batches cost.

Run it with `python -m lessons run 2`.
"""

from dataclasses import replace
from functools import cache, partial

from lessons.bill import SMALL, Bill, compare, measure_rank, timeline
from lessons.cells import columns, run_cell
from lessons.clock import BUCKET, MACHINES, Size, report
from lessons.colours import BROWN, OLIVE, VIOLET
from lessons.plots import label, new_figure, save
from lessons.recording import CONFIG, record
from lessons.rows import ROWS
from zero_min import Stage2, run_world
from zero_min.gpt import GPT, GPTConfig

BUCKETS = (1024, 4096, 16384, 65536, 262144)
DEEP = GPTConfig(context=16, layers=8, width=32)  # each tensor is a small part of this model
MICRO_BATCHES = (1, 2, 3, 4)


def run_it() -> str:
    """The output of the lesson's cell."""
    return run_cell(2, "Run it")


def broken() -> str:
    """The error of the lesson's broken cell."""
    return run_cell(2, "Break it")


@cache
def _bill(
    stage: int, world: int, bucket_size: int = 4096, micro_batches: int = 1, config: GPTConfig = SMALL
) -> Bill:
    row = ROWS[stage]
    if stage == 2:
        row = replace(
            row, trainer=lambda model, comm, lr, _: Stage2(model, comm, lr=lr, bucket_size=bucket_size)
        )
    measure_it = partial(measure_rank, micro_batches=micro_batches)
    return compare(row, run_world(measure_it, world, row, config))


def small_buckets() -> str:
    """The diary of rank 0 when the buckets are much smaller than the model."""
    return timeline(_bill(2, 4)).split("rank 1")[0].rstrip()


def bucket_sizes(world: int = 4) -> str:
    """How large buckets may be, against live bytes at the peak, on the emptiest and the fullest rank."""
    rows: list[list[object]] = [["", "collectives", "sent", "lowest peak", "highest peak", "held after"]]
    bills = {"stage 1": _bill(1, world, config=DEEP)}
    bills |= {f"stage 2, bucket_size={size}": _bill(2, world, size, config=DEEP) for size in BUCKETS}
    for name, bill in bills.items():
        collectives = sum(event.what == "reduce_scatter" for event in bill.ranks[0].events)
        numbers = [bill.sent / world, *_peaks(bill), bill.held]
        rows.append([name, collectives, *(f"{number / bill.numel:.2f}" for number in numbers)])
    return columns(rows)


def in_seconds() -> str:
    """What `python -m lessons clock 2` answers."""
    size = round(BUCKET * sum(p.numel() for p in GPT(CONFIG).parameters()))
    return report(record(partial(Stage2, bucket_size=size)), MACHINES["pcie"], Size(1e9, 8192))


def _peaks(bill: Bill) -> tuple[int, int]:
    peaks = [rank.peak for rank in bill.ranks]
    return min(peaks), max(peaks)


def micro_batches(world: int = 4) -> str:
    """What each rank sends in a step of 1 to 4 micro-batches, beside the formula."""
    rows: list[list[object]] = [["micro-batches", "stage 1", "stage 2", "4 (m+1)(N-1)/N"]]
    for m in MICRO_BATCHES:
        sent = [_bill(stage, world, micro_batches=m) for stage in (1, 2)]
        measured = [f"{bill.sent / world / bill.numel:.2f}" for bill in sent]
        rows.append([m, *measured, f"{4 * (m + 1) * (world - 1) / world:.2f}"])
    return columns(rows)


def main(world: int = 4) -> None:
    """Print and plot live bytes during a step, the price of bucket sizes, and of micro-batches."""
    print(f"bytes per parameter, {world} ranks\n{bucket_sizes(world)}\n\n{micro_batches(world)}")
    figure, (first, second, third) = new_figure(3)
    stages = {stage: _bill(stage, world) for stage in (1, 2)}
    for (stage, bill), colour in zip(stages.items(), (BROWN, VIOLET), strict=True):
        live = [event.live / bill.numel for event in bill.ranks[0].events]
        where = [i / (len(live) - 1) for i in range(len(live))]
        first.plot(where, live, "o-", color=colour, markersize=3, label=f"stage {stage}")
        between = sum(bill.formula_held.values()) / bill.numel
        first.axhline(between, linestyle="--", color=colour, label=f"formula at the end: {between:.0f}")
    label(first, "One step of rank 0", "events, from backward (0) to done (1)", "live bytes per parameter")
    bills = [_bill(2, world, size, config=DEEP) for size in BUCKETS]
    for i, (name, marker) in enumerate((("lowest", "v-"), ("highest", "^-"))):
        peaks = [_peaks(bill)[i] / bill.numel for bill in bills]
        second.plot(BUCKETS, peaks, marker, color=VIOLET, label=f"stage 2, {name} rank")
    deep = _bill(1, world, config=DEEP)
    stage1_peak = _peaks(deep)[1] / deep.numel
    second.axhline(stage1_peak, linestyle="--", color=BROWN, label="stage 1")
    second.set_xscale("log", base=2)
    label(second, "Large buckets cost memory", "bucket_size in elements", "peak live bytes per parameter")
    for stage, colour in ((1, BROWN), (2, VIOLET)):
        bills = [_bill(stage, world, micro_batches=m) for m in MICRO_BATCHES]
        sent = [bill.sent / world / bill.numel for bill in bills]
        third.plot(MICRO_BATCHES, sent, "o", color=colour, label=f"stage {stage}, measured")
    formula = [4 * (m + 1) * (world - 1) / world for m in MICRO_BATCHES]
    third.plot(MICRO_BATCHES, formula, "--", color=OLIVE, label="formula: 4 (m+1)(N-1)/N")
    third.set_xticks(MICRO_BATCHES)
    label(third, "Micro-batches cost traffic", "micro-batches m", "bytes per parameter from each rank")
    save(figure, 2)


if __name__ == "__main__":
    main()
