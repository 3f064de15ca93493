"""Pipelines beside torch's own, and how much of a batch ranks wait: a topic of `engines.py`.

Two ranks, one pipeline. The first table trains the same small model by `torch.distributed.pipelining` with
torch's AdamW, by `engine.train_batch`, and by DeepSpeed's PipelineEngine where it is installed. In the
second, each layer sleeps in place of computing, as on an accelerator of its own; so two cores measure how
long ranks wait (the idle share of a batch) at each schedule. Its first number is what the schedule's authors
give.

DeepSpeed's row follows its documentation. It has not been run yet: say so where you quote it.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zero_full
from tests.bench import interleave
from tests.bench.interleave import Series
from tests.bench.peers import NotInstalled
from zero_full import LayerSpec, PipelineModule

RANKS, LAYERS, WIDTH, SAMPLES, MICRO_BATCHES = 2, 8, 256, 16, 8
ROUNDS, STEPS = 7, 6
SLEEP = 0.005  # seconds of a layer's forward, and of each half of its backward
TORCH, OURS, DEEPSPEED = "torch's 1F1B and AdamW", "zero_full 1F1B", "DeepSpeed 1F1B"
SCHEDULES = {  # name -> (stages of a rank, placement)
    "1f1b": (1, "loop"),
    "gpipe": (1, "loop"),
    "interleaved_1f1b": (2, "loop"),
    "interleaved_zero_bubble": (2, "loop"),
    **({"zbv": (2, "v")} if torch.__version__ >= "2.13" else {}),
}


def config(schedule: str) -> dict[str, Any]:
    """Without clipping: torch's row has none."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"schedule": schedule},
    }


def module(schedule: str, layer: Any) -> PipelineModule:
    """The model in the stages that a schedule needs."""
    stages, placement = SCHEDULES[schedule]
    layers = [LayerSpec(layer) for _ in range(LAYERS)]
    loss = nn.functional.mse_loss
    return PipelineModule(layers, RANKS, None, loss, "uniform", stages_per_rank=stages, placement=placement)


class Layer(nn.Sequential):
    """A layer that computes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Sleep(torch.autograd.Function):
    """Sleeps in forward, and in backward for the gradient of the inputs; `Weigh` for that of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, asleep: list[float]) -> Tensor:
        """The inputs."""
        ctx.asleep = asleep
        rest(asleep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Their gradient."""
        rest(ctx.asleep)
        return grads[0], None


class Weigh(torch.autograd.Function):
    """The weight; its gradient takes as long as that of the inputs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, asleep: list[float]) -> Tensor:
        """The weight."""
        ctx.asleep = asleep
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Its gradient."""
        rest(ctx.asleep)
        return grads[0], None


def rest(asleep: list[float]) -> None:
    """Sleep, and note how long it was."""
    start = time.perf_counter()
    time.sleep(Sleeper.seconds)
    asleep.append(time.perf_counter() - start)


class Sleeper(nn.Module):
    """A layer that sleeps in place of computing."""

    asleep: list[float] = []  # noqa: RUF012 (of all layers of a rank)
    seconds = SLEEP

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """The inputs, weighed."""
        slept: Tensor = Sleep.apply(x, self.asleep)  # type: ignore[no-untyped-call]
        weight: Tensor = Weigh.apply(self.weight, self.asleep)  # type: ignore[no-untyped-call]
        return slept * weight


def micro_batches(width: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of one batch."""
    made = torch.Generator().manual_seed(0)
    pairs = torch.randn(MICRO_BATCHES, 2, SAMPLES, width, generator=made)
    return [(pair[0], pair[1]) for pair in pairs]


def by_torch() -> Any:
    """A function that trains one batch with torch's pipelining alone, and returns its loss."""
    rank = dist.get_rank()
    layers = [Layer() for _ in range(LAYERS)][rank * LAYERS // RANKS : (rank + 1) * LAYERS // RANKS]
    part = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, nn.functional.mse_loss)
    pairs = micro_batches(WIDTH)
    inputs, labels = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))

    def train() -> None:
        losses: list[Tensor] = []
        first, last = rank == 0, rank == RANKS - 1
        schedule.step(
            *([inputs] if first else []), target=labels if last else None, losses=losses, return_outputs=False
        )
        optimizer.step()
        optimizer.zero_grad()

    return train


def by_deepspeed() -> Any:
    """The same by DeepSpeed's PipelineEngine, which uses the process group that is already there."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotInstalled("not installed")
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    with contextlib.redirect_stdout(sys.stderr):
        ds, pipe = importlib.import_module("deepspeed"), importlib.import_module("deepspeed.pipe")
        ds.utils.logger.setLevel(logging.ERROR)
        ds.init_distributed("gloo", dist_init_required=False)
        layers = [pipe.LayerSpec(Layer) for _ in range(LAYERS)]
        loss = nn.functional.mse_loss
        net = pipe.PipelineModule(layers, num_stages=RANKS, loss_fn=loss, partition_method="uniform")
        keys = {key: value for key, value in config("1f1b").items() if key != "pipeline"}
        engine = ds.initialize(model=net, model_parameters=[*net.parameters()], config=keys)[0]
    pairs = micro_batches(WIDTH)
    return lambda: engine.train_batch(iter(pairs))


def rank_main(
    comm: Any, rounds: int, batches: int, seconds: float
) -> tuple[dict[str, Series], dict[str, list[float]], dict[str, str]]:
    """One rank: seconds of batches by row, idle shares by schedule, and why rows are missing."""
    torch.set_num_threads(1)
    Sleeper.seconds = seconds
    engine = zero_full.initialize(model=module("1f1b", Layer), config=config("1f1b"))[0]
    pairs = micro_batches(WIDTH)
    trains, missing = {TORCH: by_torch(), OURS: lambda: engine.train_batch(iter(pairs))}, dict[str, str]()
    try:
        trains[DEEPSPEED] = by_deepspeed()
    except NotInstalled as error:
        missing[DEEPSPEED] = str(error)

    def visit(name: str, number: int) -> list[float]:
        times = []
        for _ in range(batches + 1):
            dist.barrier()
            start = time.perf_counter()
            trains[name]()
            times.append(time.perf_counter() - start)
        return times[1:]

    steps = interleave.run(list(trains), rounds, visit)
    engine.destroy()
    idle = {schedule: idle_shares(schedule, batches) for schedule in SCHEDULES}
    return steps, idle, missing


def idle_shares(schedule: str, batches: int) -> list[float]:
    """The share of each batch's time in which this rank did not sleep in a layer."""
    engine = zero_full.initialize(model=module(schedule, Sleeper), config=config(schedule))[0]
    pairs, shares = micro_batches(4), []
    for _ in range(batches + 1):
        dist.barrier()
        Sleeper.asleep.clear()
        start = time.perf_counter()
        engine.train_batch(iter(pairs))
        shares.append(1 - sum(Sleeper.asleep) / (time.perf_counter() - start))
    engine.destroy()
    return shares[1:]


def expected(schedule: str) -> str:
    """The share that the schedule's authors give."""
    stages = SCHEDULES[schedule][0]
    if "zero" in schedule or schedule == "zbv":
        return "less"
    return f"{(RANKS - 1) / (stages * MICRO_BATCHES + RANKS - 1):.3f}"


def report(run: Any, small: bool) -> tuple[list[interleave.Ratio], dict[str, Any]]:
    """Measure, print both tables, and return ratios and numbers. `run`: that of a pool of ranks."""
    given = (1, 1, 0.0) if small else (ROUNDS, STEPS, SLEEP)
    ranks = run(rank_main, RANKS, *given, limit=600, collective=60)
    steps = {name: interleave.slowest([rank[0][name] for rank in ranks]) for name in ranks[0][0]}
    rows = [interleave.cells(name, series) for name, series in steps.items()]
    rows += [[name, why, ""] for name, why in ranks[0][2].items()]
    print("\n" + interleave.table(["pipeline", "ms a batch", "range"], rows))
    ratios = [
        interleave.ratio(f"{OURS} / {name}", steps[OURS], steps[name]) for name in steps if name != OURS
    ]
    idle = {}
    for schedule in SCHEDULES:
        shares = [sum(both) / RANKS for both in zip(*(rank[1][schedule] for rank in ranks), strict=True)]
        idle[schedule] = round(interleave.middle([shares]), 3)
    table = [[name, expected(name), f"{share:.3f}"] for name, share in idle.items()]
    print("\n" + interleave.table(["schedule", "idle share, by its authors", "measured"], table))
    return ratios, {"idle": idle, "layers": LAYERS, "micro_batches": MICRO_BATCHES}
