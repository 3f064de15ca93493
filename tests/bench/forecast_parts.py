"""Which part of a forecast is off? A step's measured seconds by part, beside those of the forecast.

    python -m tests.bench.forecast_parts --sizes 10M --dtypes bf16 --rows "stage 0" "stage 1" --steps 20

Parts are those of `plan`. Functions of the runtime are wrapped with timers, and a part's time is without that
of the parts within it. `waiting` is the time in barriers, for another rank. Forward and backward stand twice:
within the engine, with the runtime's hooks, and `plain`, of the same model without an engine. Numbers are
medians over steps, of each rank in milliseconds. The machine's rates are measured first, or read from a file
(`--machine`).
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

import zero_full
from tests.bench import interleave, peers
from tests.bench.forecast import (
    GIVEN,
    MICRO_BATCHES,
    PIPELINE,
    WORLD,
    forecast,
    pipeline,
    pipeline_config,
)
from tests.bench.peers import Setup
from tests.bench.step_time import DTYPES, SIZES, Plan, leave_with_parent
from tests.worlds import Pool
from zero_full.comm.communicator import Communicator
from zero_full.comm.shared_memory import SpinBarrier
from zero_full.measure.rates import QUICK, MeasuredSizes, measure_rates
from zero_full.pipeline.stage import StageLayers
from zero_full.plan.machine_file import MachineRates, read_rates
from zero_full.plan.step_time import PARTS
from zero_full.shard.group.gradients import FlatGradients
from zero_full.shard.step.update import Steppers
from zero_min.gpt import GPT, batch, load_text

Step = Callable[[], None]


class Timers:
    """Seconds by part, each without the parts within it."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = 0.0
        self.wrapped: list[tuple[Any, str, Any]] = []

    def _charge(self) -> None:
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time in this context to a part."""
        self._charge()
        self.stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self.stack.pop()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Charge the calls of a function to a part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        self.wrapped.append((owner, name, function))
        setattr(owner, name, timed)

    def unwrap(self) -> None:
        """Put all functions back."""
        while self.wrapped:
            setattr(*self.wrapped.pop())


def wrap_runtime(timers: Timers) -> None:
    """Wrap what every run of zero_full consists of."""
    timers.wrap(SpinBarrier, "__call__", "waiting")
    timers.wrap(Communicator, "all_gather", "gather")
    for name in ("reduce", "take", "average_over_replicas"):
        timers.wrap(FlatGradients, name, "reduce")
    timers.wrap(Steppers, "step", "update")


def wrap_pipelining(timers: Timers) -> None:
    """Wrap torch's pipelining."""
    timers.wrap(schedules, "_wait_batch_p2p", "waiting")
    timers.wrap(schedules, "_batch_p2p", "messages")
    timers.wrap(StageLayers, "forward", "forward")
    timers.wrap(torch.autograd, "backward", "backward")


@dataclass(frozen=True)
class Asked:
    """What a run measures."""

    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[str, ...]
    steps: int
    quick: bool
    rates: MachineRates | None


@dataclass
class Answer:
    """One rank's measurements: seconds of a step by part, by size, dtype and row."""

    rates: MachineRates
    parts: dict[tuple[str, str, str], dict[str, float]] = field(default_factory=dict)


def rank_main(_: Any, asked: Asked) -> Answer:
    """The life of a rank."""
    leave_with_parent()
    torch.set_num_threads(1)
    sizes = QUICK if asked.quick else MeasuredSizes()
    found = Answer(asked.rates or measure_rates(dist.group.WORLD, sizes=sizes))
    timers = Timers()
    for key in product(asked.sizes, asked.dtypes, asked.rows):
        size, dtype, name = key
        wrap_runtime(timers)
        try:
            build = pipeline_row if name == PIPELINE else partial(row, name)
            found.parts[key] = measure(timers, build, size, dtype, asked.steps)
        finally:
            timers.unwrap()
    return found


Built = tuple[Step, Step, Step]  # a step, a step without an engine, and what frees both


def measure(
    timers: Timers, build: Callable[..., Built], size: str, dtype: str, steps: int
) -> dict[str, float]:
    """Seconds by part."""
    step, plain, close = build(timers, size, dtype)
    samples = defaultdict[str, list[float]](list)
    for number in range(steps + 2):
        for act in (plain, step):
            timers.seconds.clear()
            dist.barrier()
            begin = time.perf_counter()
            with timers.part("runtime"):
                act()
            whole = time.perf_counter() - begin
            if number < 2:  # warm up
                continue
            if act is step:
                samples["total"].append(whole)
                for part in {*timers.seconds, *samples} - {"total", "plain forward", "plain backward"}:
                    samples[part].append(timers.seconds.get(part, 0.0))
            else:
                for part in ("plain forward", "plain backward"):
                    samples[part].append(timers.seconds.get(part, 0.0))
    close()
    return {part: median(times) for part, times in samples.items()}


def row(name: str, timers: Timers, size: str, dtype: str) -> Built:
    """A row of `forecast.py` that is no pipeline."""
    shape = Plan(size, dtype, ())
    setup = Setup(SIZES[size], DTYPES[dtype], WORLD, None, shape.bucket, overlap=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = batch(load_text(), *shape.batch, generator)
    model = setup.model()
    engine = zero_full.initialize(model=model, config=peers.ours_config(setup, **GIVEN[name]))[0]
    other = GPT(SIZES[size]).to(DTYPES[dtype])

    def step() -> None:
        with timers.part("forward"):
            loss = engine(x, y)
        with timers.part("backward"):
            engine.backward(loss)
        engine.step()

    def plain() -> None:
        with timers.part("plain forward"):
            loss = other(x, y)
        with timers.part("plain backward"):
            loss.backward()
        other.zero_grad()

    return step, plain, engine.destroy


def pipeline_row(timers: Timers, size: str, dtype: str) -> Built:
    """The pipeline of `forecast.py`."""
    wrap_pipelining(timers)
    generator = torch.Generator().manual_seed(0)
    shape = Plan(size, dtype, ())
    pairs = [batch(load_text(), *shape.batch, generator) for _ in range(MICRO_BATCHES)]
    engine = zero_full.initialize(model=pipeline(size), config=pipeline_config(dtype))[0]

    def step() -> None:
        engine.train_batch(iter(pairs))

    return step, lambda: None, engine.destroy


ORDER = ("forward", "plain forward", "backward", "plain backward", "reduce", "gather", "update", "messages")
ORDER += ("runtime", "waiting", "total")


def report(asked: Asked, answers: list[Answer]) -> Iterator[str]:
    """Yield a table for each row."""
    for key in answers[0].parts:
        made = forecast(*key, answers[0].rates)
        time_of = made.step_time.as_dict() if made.step_time is not None else {}
        yield f"\n{' '.join(key)} {made.not_forecast}\n"
        lines = []
        for part in ORDER:
            measured = [f"{1e3 * answer.parts[key].get(part, 0.0):.2f}" for answer in answers]
            seconds = time_of.get(part.removeprefix("plain "), 0.0)
            seconds += time_of.get("idle", 0.0) if part == "waiting" else 0.0
            expected = f"{1e3 * seconds:.2f}"
            lines.append([PARTS.get(part, part), *measured, expected])
        yield interleave.table(
            ["part", *[f"rank {n}, ms" for n in range(len(answers))], "forecast, ms"], lines
        )


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = [*GIVEN, PIPELINE]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--rows", nargs="+", choices=every, default=every, metavar="ROW")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--machine", help="a file of `doctor --measure --out`, of as many ranks")
    parser.add_argument("--write", help="write the measured rates to this file")
    parser.add_argument("--quick", action="store_true", help="few sizes of the machine: for a rehearsal")
    given = parser.parse_args()
    print(interleave.heading())
    rates = None if given.machine is None else read_rates(given.machine)
    what = tuple(given.sizes), tuple(given.dtypes), tuple(given.rows)
    asked = Asked(*what, given.steps, given.quick, rates)
    pool = Pool()
    try:
        answers = pool.run(rank_main, WORLD, asked, limit=600, collective=120)
    finally:
        pool.stop()
    if given.write:
        answers[0].rates.write(given.write)
    print("\n".join(report(asked, answers)))


if __name__ == "__main__":
    main()
