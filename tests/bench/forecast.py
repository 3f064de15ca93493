"""How near is the forecast of a step's time? Rates of this machine, then steps of the same runs.

    python -m tests.bench.forecast --sizes 10M 50M --dtypes fp32 bf16 --rounds 5

Ranks measure the machine as `doctor --measure --out` does, before and after the rows of each size and dtype.
The mean of both counts for these rows, because a machine's speed varies. Rows are those of `step_time.py`:
stages 0 to 3, stage 2 over messages and stage 2 with offload to the host, and a pipeline of two stages. Every
visit builds its row's engine, warms it up and destroys it, so that one engine is alive, as in a user's run.
The forecast of a row is `plan`'s, of its configuration and its model on the meta device. The last line is
JSON.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.bench import interleave, peers
from tests.bench.interleave import Series
from tests.bench.peers import Row, Setup
from tests.bench.step_time import DTYPES, SIZES, Plan, Rank, leave_with_parent
from tests.worlds import Pool
from zero_full import LayerSpec, PipelineModule
from zero_full.measure.rates import QUICK, MeasuredSizes, mean_rates, measure_rates
from zero_full.plan import plan
from zero_full.plan.machine_file import MachineRates
from zero_min.gpt import GPT, Block, GPTConfig

WORLD = 2
NEAR = 0.15  # the aim: forecast and measured time differ by at most this share
GIVEN: dict[str, dict[str, Any]] = {  # by row: the arguments of `peers.ours_config`
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "stage 2, messages": {"stage": 2, "messages": True},
    "stage 2, state on the host": {"stage": 2, "offload": {}},
}
ROWS = {name: Row(peers.zero_full(**given)) for name, given in GIVEN.items()}
PIPELINE, MICRO_BATCHES = "pipeline of 2 stages", 8


class Embedding(nn.Module):
    """The first layer of a GPT."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T)."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.characters(tokens) + self.positions(where)
        return x


class Head(nn.Sequential):
    """The last layers of a GPT."""

    def __init__(self, config: GPTConfig) -> None:
        out = nn.Linear(config.width, config.vocabulary, bias=False)
        super().__init__(nn.LayerNorm(config.width), out)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pipeline(size: str) -> PipelineModule:
    """The same GPT in two stages, with a head of its own."""
    config = SIZES[size]
    layers = [LayerSpec(Embedding, config), *[LayerSpec(Block, config)] * config.layers]
    return PipelineModule([*layers, LayerSpec(Head, config)], WORLD, loss_fn=loss_of)


def pipeline_config(dtype: str) -> dict[str, Any]:
    """Its configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
    }


@dataclass(frozen=True)
class Asked:
    """What a run measures."""

    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    rounds: int
    steps: int
    warmup: int
    rows: tuple[str, ...]
    pipeline: bool
    quick: bool


@dataclass
class Answer:
    """One rank's measurements."""

    rates: list[MachineRates] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each measurement of the machine
    steps: dict[tuple[str, str, str], Series] = field(default_factory=dict)  # by size, dtype and row


def rank_main(_: Any, asked: Asked) -> Answer:
    """The life of a rank."""
    leave_with_parent()
    torch.set_num_threads(1)
    found = Answer()

    def measure_machine() -> None:
        begin = time.perf_counter()
        found.rates.append(measure_rates(dist.group.WORLD, sizes=QUICK if asked.quick else MeasuredSizes()))
        found.seconds.append(time.perf_counter() - begin)

    measure_machine()
    for size in asked.sizes:
        for dtype in asked.dtypes:
            counts = asked.rounds, asked.warmup, asked.steps
            rank = Rank(Plan(size, dtype, asked.rows, *counts, overlap=False, keep=False), ROWS)
            for name, row in rank.run().items():
                found.steps[size, dtype, name] = row.step
            pairs = rank.data[:MICRO_BATCHES]
            del rank
            if asked.pipeline:
                found.steps[size, dtype, PIPELINE] = pipeline_steps(asked, size, dtype, pairs)
            measure_machine()
    return found


def pipeline_steps(asked: Asked, size: str, dtype: str, pairs: list[Any]) -> Series:
    """Seconds of batches of a pipeline."""
    pairs = (pairs * MICRO_BATCHES)[:MICRO_BATCHES]
    series: Series = []
    for _ in range(asked.rounds):
        engine = zero_full.initialize(model=pipeline(size), config=pipeline_config(dtype))[0]
        times = []
        for _ in range(asked.warmup + asked.steps):
            dist.barrier()
            start = time.perf_counter()
            engine.train_batch(iter(pairs))
            times.append(time.perf_counter() - start)
        series.append(times[asked.warmup :])
        engine.destroy()
    return series


def forecast(size: str, dtype: str, name: str, rates: MachineRates) -> Any:
    """The plan of a row, with its forecast."""
    config, shape = SIZES[size], Plan(size, dtype, ())
    setup = Setup(config, DTYPES[dtype], WORLD, None, shape.bucket, overlap=False)
    x = torch.empty(shape.batch, dtype=torch.int64, device="meta")
    if name == PIPELINE:
        with torch.device("meta"):
            stages = pipeline(size)
        made = pipeline_config(dtype)
        return plan(stages, made, 1, inputs=[x, x], device="cpu", pipe=WORLD, machine=rates)
    with torch.device("meta"):
        model = GPT(config).to(DTYPES[dtype])
    made = peers.ours_config(setup, **GIVEN[name])
    return plan(model, made, WORLD, inputs=[x, x], device="cpu", machine=rates)


HEAD = ["row", "measured, ms", "range", "forecast, ms", "forecast / measured", ""]


def report(answers: Sequence[Answer]) -> tuple[str, dict[str, Any]]:
    """A table of all rows, and the numbers behind it."""
    lines, numbers = list[list[str]](), dict[str, Any]()
    measured = answers[0].rates
    groups = [*dict.fromkeys((size, dtype) for size, dtype, _ in answers[0].steps)]
    for key in answers[0].steps:
        before = groups.index(key[:2])
        rates = mean_rates(measured[before : before + 2])
        series = interleave.slowest([answer.steps[key] for answer in answers])
        middle, (low, high) = interleave.middle(series), interleave.spread(series)
        made = forecast(*key, rates)
        name = " ".join(key)
        if made.step_time is None:
            lines.append([name, f"{1e3 * middle:.1f}", "", f"not forecast: {made.not_forecast}", "", ""])
            continue
        ratio = made.step_time.total / middle
        numbers[name] = {"measured": middle, "forecast": made.step_time.as_dict(), "ratio": round(ratio, 3)}
        near = "" if abs(ratio - 1) <= NEAR else f"off by more than {NEAR:.0%}"
        span, forecasted = f"{1e3 * low:.1f}-{1e3 * high:.1f}", f"{1e3 * made.step_time.total:.1f}"
        lines.append([name, f"{1e3 * middle:.1f}", span, forecasted, f"{ratio:.2f}", near])
    return interleave.table(HEAD, lines), numbers


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "50M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    every = [*GIVEN, PIPELINE]
    parser.add_argument("--rows", nargs="+", choices=every, default=every, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps a visit")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="few sizes of the machine: for a rehearsal")
    return parser.parse_args()


def main() -> None:
    """Measure the machine and the rows, print the table, end with one JSON line."""
    given = arguments()
    print(interleave.heading())
    what = tuple(given.sizes), tuple(given.dtypes), given.rounds, given.steps, given.warmup
    rows = tuple(row for row in given.rows if row != PIPELINE)
    asked = Asked(*what, rows, PIPELINE in given.rows, given.quick)
    pool = Pool()
    try:
        answers = pool.run(rank_main, WORLD, asked, limit=1200, collective=120)
    finally:
        pool.stop()
    took = max(second for answer in answers for second in answer.seconds)
    print(f"\nrates of the machine: measured {len(answers[0].rates)} times, {took:.0f} s at most\n")
    table, numbers = report(answers)
    print(table)
    within = sum(abs(row["ratio"] - 1) <= NEAR for row in numbers.values())
    print(f"\n{within} of {len(numbers)} rows are within {NEAR:.0%}\n")
    about = {"versions": interleave.versions(), "cpus": os.cpu_count(), "rows": numbers}
    print(interleave.json_line([], **about))


if __name__ == "__main__":
    main()
